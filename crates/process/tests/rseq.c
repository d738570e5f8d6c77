// As step.c, by a thread that is nearly always inside a restartable sequence. The kernel forgets a
// sequence that it finds left without an abort; so one that is brought back into its middle ends in
// a sequence that is none. To be run without the C library's own registration:
// GLIBC_TUNABLES=glibc.pthread.rseq=0.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct sequence {
    uint32_t version, flags;
    uint64_t start, length, abort;
} __attribute__((aligned(32)));
struct area {
    uint32_t start, cpu;
    uint64_t sequence;
    uint32_t flags, node, concurrency;
    char rest[4];
} __attribute__((aligned(32)));

#define SIGNATURE 0x53053053
static struct area area;
static long aborts;

// Spins inside of the sequence: false if it was aborted.
static int spin(long rounds) {
    static struct sequence sequence;
    asm goto(
        "lea 1f(%%rip), %%rax\n\t" "mov %%rax, 8(%[sequence])\n\t"
        "lea 2f(%%rip), %%rdx\n\t" "sub %%rax, %%rdx\n\t" "mov %%rdx, 16(%[sequence])\n\t"
        "lea 4f(%%rip), %%rax\n\t" "mov %%rax, 24(%[sequence])\n\t"
        "mov %[sequence], 8(%[area])\n\t"
        "mov %[rounds], %%rax\n\t"
        "1:\n\t" "dec %%rax\n\t" "jnz 1b\n\t"
        "cmpq $0, 8(%[area])\n\t" "je %l[lost]\n\t"
        "2:\n\t" "jmp 5f\n\t"
        // The kernel looks for the signature before the handler.
        ".long 0x53053053\n\t"
        "4:\n\t" "jmp %l[aborted]\n\t"
        "5:\n\t"
        : : [sequence] "r"(&sequence), [area] "r"(&area), [rounds] "r"(rounds) : "rax", "rdx", "memory", "cc" : aborted, lost);
    return 1;
lost:
    printf("wrong: in a sequence that the kernel does not know\n");
    fflush(stdout);
    _exit(1);
aborted:
    return 0;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    if (syscall(SYS_rseq, &area, sizeof area, 0, SIGNATURE)) return printf("wrong rseq\n"), 1;
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        struct timespec from, now;
        clock_gettime(CLOCK_MONOTONIC, &from);
        do {
            if (!spin(20000000)) aborts++;
            clock_gettime(CLOCK_MONOTONIC, &now);
        } while ((now.tv_sec - from.tv_sec) * 1000000000 + now.tv_nsec - from.tv_nsec < 3000000);
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        if (write(1, line, length) != length) return 2;
    }
    return aborts ? 7 : 8;
}
