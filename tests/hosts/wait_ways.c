// Times the ways in which the host can learn that a kernel has ended, by the driver API alone: the
// calls that wait, questions asked again and again, and a word of shared memory that the device
// writes itself (cuStreamWriteValue), which another thread reads. One JSON object: a name with the
// median in microseconds over all rounds, in which the ways take turns. Built by: gcc -O2 -o
// wait_ways wait_ways.c -ldl -lpthread. Usage: wait_ways [ROUNDS [TURNS]]; within 20 seconds.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int Status;
typedef uint64_t Device;
typedef void *Handle;
enum { NOT_READY = 600, MOST = 1 << 16 };

static Status (*init)(unsigned), (*retain)(Handle *, int), (*set_current)(Handle), (*load)(Handle *, const void *);
static Status (*find)(Handle *, Handle, const char *), (*new_stream)(Handle *, unsigned), (*new_event)(Handle *, unsigned);
static Status (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **);
static Status (*wait_stream)(Handle), (*ask_stream)(Handle), (*record)(Handle, Handle), (*wait_event)(Handle), (*ask_event)(Handle);
static Status (*write32)(Handle, Device, uint32_t, unsigned), (*write64)(Handle, Device, uint64_t, unsigned);
static Status (*host_call)(Handle, void (*)(void *), void *), (*pin)(void *, size_t, unsigned), (*device_address)(Device *, void *, unsigned);
static Status (*attribute)(int *, int, int);

static void *driver;
static Handle stream, event, blocking, null_kernel, flag_kernel;
// In memory that two processes could share: what the device writes, and what the threads tell each
// other.
static struct Shared {
    volatile uint32_t word;
    char pad1[60];
    volatile uint64_t wide;
    char pad2[56];
    volatile uint64_t asked;
    char pad3[56];
    volatile uint64_t answered;
    char pad4[56];
    volatile uint64_t handed;
} *shared;
static Device word_there, wide_there;
static uint32_t next = 1;

static void fail(const char *what, Status status)
{
    fprintf(stderr, "%s: %d\n", what, status);
    exit(1);
}

#define CALL(function, ...) do { Status s_ = function(__VA_ARGS__); if (s_) fail(#function, s_); } while (0)

static void *symbol(const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) fail(name, -1);
    return found;
}

static double now(void)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec / 1e3;
}

static const char *ptx =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry nothing()\n{\nret;\n}\n"
    ".visible .entry flag(.param .u64 to, .param .u32 value)\n{\n.reg .b64 %rd<2>;\n.reg .b32 %r<2>;\n"
    "ld.param.u64 %rd1, [to];\nld.param.u32 %r1, [value];\nst.release.sys.global.u32 [%rd1], %r1;\nret;\n}\n";

static void one(void) { CALL(launch, null_kernel, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL); }
static void hundred(void) { for (int i = 0; i < 100; i++) one(); }
static void none(void) {}

// Ways to wait for what was submitted.
static void by_stream(void) { CALL(wait_stream, stream); }
static void by_asking_stream(void) { while (ask_stream(stream) == NOT_READY) {} }
static void by_event(void) { CALL(record, event, stream); CALL(wait_event, event); }
static void by_blocking_event(void) { CALL(record, blocking, stream); CALL(wait_event, blocking); }
static void by_asking_event(void) { CALL(record, event, stream); while (ask_event(event) == NOT_READY) {} }
static void by_word(void) { CALL(write32, stream, word_there, ++next, 0); while (shared->word != next) {} }
static void by_wide(void) { CALL(write64, stream, wide_there, ++next, 0); while (shared->wide != next) {} }
static void done(void *value) { shared->word = (uint32_t)(uintptr_t)value; }
static void by_host_call(void) { CALL(host_call, stream, done, (void *)(uintptr_t)++next); while (shared->word != next) {} }
static void by_kernel(void)
{
    uint32_t value = ++next;
    void *arguments[] = {&word_there, &value};
    CALL(launch, flag_kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL);
    while (shared->word != value) {}
}

// Ways in which a thread that serves another one's requests (as kedge's proxy does) hands the end
// over to it.
enum Serving { SERVES_STREAM, SERVES_EVENT, SERVES_WORD, SERVES_LOOKING, SERVES_HANDED, SERVING };
static const char *const served[] = {"the server waits for the stream, then tells", "the server asks the event, then tells",
    "the device writes where the client looks", "the server looks at a word that the device writes, then tells",
    "the server hands the wait to a thread, which tells"};
static volatile int serving = -1;

static void *serve(void *context)
{
    CALL(set_current, context);
    for (uint64_t seen = 0;;) {
        while (shared->asked == seen) {}
        seen = shared->asked;
        if (seen == UINT64_MAX) return NULL;
        one();
        switch (serving) {
        case SERVES_STREAM: by_stream(); shared->answered = seen; break;
        case SERVES_EVENT: by_asking_event(); shared->answered = seen; break;
        case SERVES_WORD: CALL(write32, stream, word_there, (uint32_t)seen, 0); break;
        case SERVES_LOOKING:
            CALL(write32, stream, word_there, (uint32_t)seen, 0);
            while (shared->word != (uint32_t)seen) {}
            shared->answered = seen;
            break;
        case SERVES_HANDED: shared->handed = seen; break;
        }
    }
}

static void *take_over(void *context)
{
    CALL(set_current, context);
    for (uint64_t seen = 0;;) {
        while (shared->handed == seen) {}
        seen = shared->handed;
        if (seen == UINT64_MAX) return NULL;
        by_stream();
        shared->answered = seen;
    }
}

static double request(int how)
{
    double begin = now();
    uint64_t number = ++next;
    shared->asked = number;
    if (how == SERVES_WORD) while (shared->word != (uint32_t)number) {}
    else while (shared->answered != number) {}
    return now() - begin;
}

static const struct Way { const char *name; void (*submit)(void), (*wait)(void); } ways[] = {
    {"one kernel, stream synchronize", one, by_stream}, {"one kernel, stream query", one, by_asking_stream},
    {"one kernel, event synchronize", one, by_event}, {"one kernel, blocking event synchronize", one, by_blocking_event},
    {"one kernel, event query", one, by_asking_event}, {"one kernel, write 32", one, by_word},
    {"one kernel, write 64", one, by_wide},
    {"one kernel, host function", one, by_host_call}, {"one kernel that writes the word itself", none, by_kernel},
    {"one kernel, then one that writes the word", one, by_kernel},
    {"100 kernels, stream synchronize", hundred, by_stream}, {"100 kernels, event query", hundred, by_asking_event},
    {"100 kernels, write 32", hundred, by_word},
    {"no kernel, event query", none, by_asking_event}, {"no kernel, write 32", none, by_word},
};
enum { WAYS = sizeof ways / sizeof *ways };

static double found[WAYS + SERVING + 3][MOST];
static int counts[WAYS + SERVING + 3];

static void keep(int at, double value) { if (counts[at] < MOST) found[at][counts[at]++] = value; }

static int less(const void *a, const void *b) { return (*(double *)a > *(double *)b) - (*(double *)a < *(double *)b); }

static void say(const char *name, int at)
{
    static const char *separator = "{";
    qsort(found[at], counts[at], sizeof(double), less);
    int n = counts[at];
    printf("%s\n \"%s\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f, \"count\": %d}", separator, name,
           n ? found[at][n / 2] : -1, n ? found[at][n / 10] : -1, n ? found[at][n * 9 / 10] : -1, n);
    separator = ",";
}

static void open_driver(Handle *context)
{
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) fail(dlerror(), -1);
    init = symbol("cuInit"), retain = symbol("cuDevicePrimaryCtxRetain"), set_current = symbol("cuCtxSetCurrent");
    load = symbol("cuModuleLoadData"), find = symbol("cuModuleGetFunction"), new_stream = symbol("cuStreamCreate");
    new_event = symbol("cuEventCreate"), launch = symbol("cuLaunchKernel"), wait_stream = symbol("cuStreamSynchronize");
    ask_stream = symbol("cuStreamQuery"), record = symbol("cuEventRecord"), wait_event = symbol("cuEventSynchronize");
    ask_event = symbol("cuEventQuery"), write32 = symbol("cuStreamWriteValue32_v2"), write64 = symbol("cuStreamWriteValue64_v2");
    host_call = symbol("cuLaunchHostFunc"), pin = symbol("cuMemHostRegister_v2");
    device_address = symbol("cuMemHostGetDevicePointer_v2"), attribute = symbol("cuDeviceGetAttribute");
    Handle module;
    CALL(init, 0);
    CALL(retain, context, 0);
    CALL(set_current, *context);
    CALL(load, &module, ptx);
    CALL(find, &null_kernel, module, "nothing");
    CALL(find, &flag_kernel, module, "flag");
    CALL(new_stream, &stream, 1);
    CALL(new_event, &event, 2);
    CALL(new_event, &blocking, 3);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 10, turns = argc > 2 ? atoi(argv[2]) : 400, wide = 0;
    Handle context;
    open_driver(&context);
    int file = memfd_create("ring", 0);
    if (file < 0 || ftruncate(file, 4096)) fail("memfd", -1);
    shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CALL(pin, shared, 4096, 3);
    CALL(device_address, &word_there, (void *)&shared->word, 0);
    CALL(device_address, &wide_there, (void *)&shared->wide, 0);
    // CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    CALL(attribute, &wide, 122, 0);
    pthread_t server, taker;
    pthread_create(&server, NULL, serve, context);
    pthread_create(&taker, NULL, take_over, context);
    for (int round = -1; round < rounds; round++) {
        for (int way = 0; way < WAYS; way++) {
            for (int turn = 0; turn < turns; turn++) {
                double begin = now();
                ways[way].submit();
                ways[way].wait();
                if (round >= 0) keep(way, now() - begin);
                CALL(wait_stream, stream);
            }
        }
        for (int how = 0; how < SERVING; how++) {
            serving = how;
            for (int turn = 0; turn < turns; turn++) {
                double took = request(how);
                if (round >= 0) keep(WAYS + how, took);
                CALL(wait_stream, stream);
            }
        }
        // What submitting alone costs.
        for (int turn = 0; turn < turns; turn++) {
            double begin = now();
            CALL(record, event, stream);
            double recorded = now();
            CALL(write32, stream, word_there, ++next, 0);
            double wrote = now();
            one();
            double launched = now();
            if (round >= 0) keep(WAYS + SERVING, recorded - begin), keep(WAYS + SERVING + 1, wrote - recorded), keep(WAYS + SERVING + 2, launched - wrote);
            CALL(wait_stream, stream);
        }
    }
    shared->asked = shared->handed = UINT64_MAX;
    pthread_join(server, NULL);
    pthread_join(taker, NULL);
    for (int way = 0; way < WAYS; way++) say(ways[way].name, way);
    for (int how = 0; how < SERVING; how++) say(served[how], WAYS + how);
    say("submit an event's record", WAYS + SERVING);
    say("submit a write 32", WAYS + SERVING + 1);
    say("submit a kernel", WAYS + SERVING + 2);
    printf(",\n \"64 bits\": %d\n}\n", wide);
    return 0;
}
