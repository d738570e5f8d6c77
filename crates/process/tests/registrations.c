// Two threads that register an area for restartable sequences each, at a place that the first
// argument names, and tell their id, its address, and then nothing more. To be run without the C
// library's own registration (GLIBC_TUNABLES=glibc.pthread.rseq=0), but for `library`.
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SIGNATURE 0x53053053
struct area {
    uint32_t words[8];
} __attribute__((aligned(32)));

static struct area fixed[2];
static __thread struct area local;
static struct area *allocated[2];
static const char *place;
static pthread_barrier_t both;

// The C library's own area: where it is, if a second registration there is answered so.
static struct area *of_library(void) {
    char *self;
    asm("mov %%fs:0, %0" : "=r"(self));
    for (char *at = self - (64 << 10); at < self + 4096; at += 32)
        if (syscall(SYS_rseq, at, 32, 0, SIGNATURE) == -1 && errno == EBUSY) return (void *)at;
    return 0;
}

static void *thread(void *argument) {
    long number = (long)argument;
    struct area *area = 0;
    if (!strcmp(place, "library")) {
        // An area that no program has tells whether one is registered at all.
        int registered = syscall(SYS_rseq, -1ul << 47, 32, 0, SIGNATURE) == -1 && errno == EINVAL;
        area = registered ? of_library() : 0;
    }
    if (!strcmp(place, "static") || !strcmp(place, "signature")) area = &fixed[number];
    if (!strcmp(place, "local")) area = &local;
    if (!strcmp(place, "heap")) area = allocated[number];
    if (!strcmp(place, "far")) area = (struct area *)(0x100000000000ul) + number;
    uint32_t signature = strcmp(place, "signature") ? SIGNATURE : 0x12345678;
    if (area && strcmp(place, "library") && syscall(SYS_rseq, area, 32, 0, signature)) {
        printf("wrong: %s\n", strerror(errno));
        exit(1);
    }
    char line[64];
    int length = snprintf(line, sizeof line, "%ld %lx\n", syscall(SYS_gettid), (long)area);
    if (write(1, line, length) != length) exit(2);
    pthread_barrier_wait(&both);
    // One is inside of a call when it is stopped, the other is not.
    volatile long spin = 0;
    for (;;)
        if (number) pause();
        else spin++;
}

int main(int argc, char **argv) {
    place = argc > 1 ? argv[1] : "none";
    for (int number = 0; number < 2; number++) allocated[number] = aligned_alloc(32, sizeof(struct area));
    void *far = mmap((void *)0x100000000000ul, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (far == MAP_FAILED) return 3;
    pthread_barrier_init(&both, 0, 2);
    pthread_t other;
    pthread_create(&other, 0, thread, (void *)1);
    thread((void *)0);
}
