// Moves its own devices to each place that it is given, and says what came of it: 0 or -1, whether
// its memory there is what it was, and why not. usage: moves TO…
#include <dlfcn.h>
#include <kedge.h>

static int (*copy_to)(unsigned long long, const void *, size_t);
static int (*copy_back)(void *, unsigned long long, size_t);

// Some memory of a device, if there is one.
static unsigned long long memory(void) {
    int (*init)(unsigned), (*retain)(void **, int), (*make_current)(void *), (*allocate)(unsigned long long *, size_t);
    void *context, *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    unsigned long long address;
    if (cuda == NULL) return 0;
    *(void **)&init = dlsym(cuda, "cuInit");
    *(void **)&retain = dlsym(cuda, "cuDevicePrimaryCtxRetain");
    *(void **)&make_current = dlsym(cuda, "cuCtxSetCurrent");
    *(void **)&allocate = dlsym(cuda, "cuMemAlloc_v2");
    *(void **)&copy_to = dlsym(cuda, "cuMemcpyHtoD_v2");
    *(void **)&copy_back = dlsym(cuda, "cuMemcpyDtoH_v2");
    if (init(0) || retain(&context, 0) || make_current(context) || allocate(&address, sizeof(int))) return 0;
    return address;
}

int main(int count, char **words) {
    unsigned long long address = memory();
    for (int turn = 1; turn < count; turn++) {
        int number = turn * 1000 + (int)getpid(), found = 0, outcome;
        if (address != 0 && copy_to(address, &number, sizeof number)) return 1;
        outcome = kedge_migrate(words[turn]);
        if (address != 0 && copy_back(&found, address, sizeof found)) return 2;
        printf("%d %s %s\n", outcome, found == number ? "same" : "none", kedge_error());
        fflush(stdout);
    }
    return 6;
}
