// Work with names that a trace shows. Usage: traced CASE [COUNT]
//   work      one of each kind of work, in order
//   two       two streams at once, COUNT kernels each
//   many      COUNT launches
//   killed    work, and then SIGKILL
//   waits     work, "ready", and more work when a line comes
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <unistd.h>

#define CHECK(call)                                                                               \
    do {                                                                                          \
        cudaError_t error = (call);                                                               \
        if (error != cudaSuccess) {                                                               \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                        \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

enum { WORDS = 1 << 16 };

__global__ void first(int *words)
{
    words[blockIdx.x * blockDim.x + threadIdx.x] += 1;
}

__global__ void second(int *words, int rounds)
{
    int *word = words + blockIdx.x * blockDim.x + threadIdx.x;
    for (int i = 0; i < rounds; ++i) *word = *word * 3 + i;
}

static void graph(cudaStream_t stream, int *words)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    first<<<WORDS / 256, 256, 0, stream>>>(words);
    second<<<WORDS / 256, 256, 0, stream>>>(words, 2);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaGraphLaunch(exec, stream));
    CHECK(cudaStreamSynchronize(stream));
}

static void work(cudaStream_t stream)
{
    int *words, *host = (int *)calloc(WORDS, sizeof(int));
    CHECK(cudaMalloc(&words, WORDS * sizeof(int)));
    CHECK(cudaMemcpyAsync(words, host, WORDS * sizeof(int), cudaMemcpyHostToDevice, stream));
    first<<<WORDS / 256, 256, 0, stream>>>(words);
    second<<<WORDS / 256, 256, 0, stream>>>(words, 4);
    CHECK(cudaMemsetAsync(words, 7, 1000, stream));
    CHECK(cudaMemcpyAsync(host, words, 4096, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    graph(stream, words);
    CHECK(cudaFree(words));
    free(host);
}

static void many(int count, cudaStream_t one, cudaStream_t other)
{
    int *words;
    CHECK(cudaMalloc(&words, 2 * WORDS * sizeof(int)));
    for (int i = 0; i < count; ++i) {
        first<<<4, 32, 0, one>>>(words);
        if (other) second<<<4, 32, 0, other>>>(words + WORDS, 1);
    }
    CHECK(cudaDeviceSynchronize());
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "work";
    int count = argc > 2 ? atoi(argv[2]) : 100;
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    if (!strcmp(what, "two")) {
        many(count, stream, other);
        return 0;
    }
    if (!strcmp(what, "many")) {
        many(count, stream, NULL);
        return 0;
    }
    work(stream);
    if (!strcmp(what, "killed")) raise(SIGKILL);
    if (!strcmp(what, "waits")) {
        char line[16];
        puts("ready");
        fflush(stdout);
        if (!fgets(line, sizeof line, stdin)) return 1;
        work(stream);
    }
    return 0;
}
