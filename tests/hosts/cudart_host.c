/* Hosts CUDA runtimes by path, as a program that nvcc compiled would: registers a fatbin, launches
 * its kernel `fill(int *p, int v)` and checks the result.
 *
 *     cudart_host FATBIN THREADS LIBCUDART...
 *
 * Every runtime is opened beside the others in this process; THREADS host threads launch at once. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned x, y, z; } dim3;
struct wrapper { int magic, version; const void *data; void *filename; };

struct runtime {
    const char *path;
    int (*version)(int *);
    int (*malloc)(void **, size_t);
    int (*memcpy)(void *, const void *, size_t, int);
    int (*launch)(const void *, dim3, dim3, void **, size_t, void *);
    int (*synchronize)(void);
    int (*free)(void *);
    const char *(*error_name)(int);
    void **(*register_binary)(void *);
    void (*register_end)(void **);
    void (*register_function)(void **, const char *, char *, const char *, int, void *, void *, void *, void *, int *);
    void (*unregister)(void **);
    char stub; /* its address stands for the kernel */
};

static void *find(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (!symbol) printf("%s\n", dlerror()), exit(2);
    return symbol;
}

static void check(struct runtime *r, const char *what, int status)
{
    if (status == 0) return;
    printf("%s: %s: %s\n", r->path, what, r->error_name(status));
    exit(1);
}

static void *work(void *argument)
{
    struct runtime *r = argument;
    enum { n = 64 };
    for (int round = 0; round < 20; round++) {
        int host[n], value = 1000 + round;
        void *device;
        check(r, "cudaMalloc", r->malloc(&device, sizeof host));
        void *args[] = {&device, &value};
        dim3 one = {1, 1, 1}, block = {n, 1, 1};
        check(r, "cudaLaunchKernel", r->launch(&r->stub, one, block, args, 0, NULL));
        check(r, "cudaMemcpy", r->memcpy(host, device, sizeof host, 2));
        for (int i = 0; i < n; i++)
            if (host[i] != value + i) printf("%s: wrong at %d: %d\n", r->path, i, host[i]), exit(1);
        check(r, "cudaFree", r->free(device));
    }
    check(r, "cudaDeviceSynchronize", r->synchronize());
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: cudart_host FATBIN THREADS LIBCUDART...\n"), 2;
    FILE *file = fopen(argv[1], "rb");
    static _Alignas(16) char fatbin[1 << 20];
    if (!file || fread(fatbin, 1, sizeof fatbin, file) < 16) return perror(argv[1]), 2;
    int threads = atoi(argv[2]), count = argc - 3;
    struct runtime *runtimes = calloc(count, sizeof *runtimes);
    void ***handles = calloc(count, sizeof *handles);
    struct wrapper wrapper = {0x466243b1, 1, fatbin, NULL};
    for (int i = 0; i < count; i++) {
        struct runtime *r = &runtimes[i];
        r->path = argv[3 + i];
        void *library = dlopen(r->path, RTLD_NOW | RTLD_LOCAL);
        if (!library) return printf("%s\n", dlerror()), 2;
        r->version = find(library, "cudaRuntimeGetVersion");
        r->malloc = find(library, "cudaMalloc");
        r->memcpy = find(library, "cudaMemcpy");
        r->launch = find(library, "cudaLaunchKernel");
        r->synchronize = find(library, "cudaDeviceSynchronize");
        r->free = find(library, "cudaFree");
        r->error_name = find(library, "cudaGetErrorName");
        r->register_binary = find(library, "__cudaRegisterFatBinary");
        r->register_end = find(library, "__cudaRegisterFatBinaryEnd");
        r->register_function = find(library, "__cudaRegisterFunction");
        r->unregister = find(library, "__cudaUnregisterFatBinary");
        int version;
        check(r, "cudaRuntimeGetVersion", r->version(&version));
        printf("runtime %d\n", version);
        handles[i] = r->register_binary(&wrapper);
        r->register_function(handles[i], &r->stub, "_Z4fillPii", "_Z4fillPii", -1, NULL, NULL, NULL, NULL, NULL);
        r->register_end(handles[i]);
    }
    pthread_t *thread = calloc((size_t)threads * count, sizeof *thread);
    for (int t = 0; t < threads * count; t++) pthread_create(&thread[t], NULL, work, &runtimes[t % count]);
    for (int t = 0; t < threads * count; t++) pthread_join(thread[t], NULL);
    for (int i = 0; i < count; i++) runtimes[i].unregister(handles[i]);
    printf("ok %d runtimes, %d threads each\n", count, threads);
    return 0;
}
