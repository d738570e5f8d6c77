// Has its pages one by one, each with holes around it, and checks all of them at each step: so many
// runs that the kernel tells them in several answers.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, APART = 3 };

static uint64_t *memory, *seeds;

static void fill(long run, uint64_t seed) {
    uint64_t *words = memory + run * APART * WORDS;
    seeds[run] = seed;
    for (int i = 0; i < WORDS; i++) words[i] = seed * 0x9e3779b97f4a7c15u * (i + 1);
}

static void check(long runs) {
    for (long run = 0; run < runs; run++) {
        for (int i = 0; i < APART * WORDS; i++) {
            uint64_t expected = i < WORDS ? seeds[run] * 0x9e3779b97f4a7c15u * (i + 1) : 0;
            // Zeros are looked at by one byte in a while: what is looked at stays no hole, but a
            // page of zeros.
            if (i >= WORDS && run % 64) break;
            if (memory[run * APART * WORDS + i] == expected) continue;
            printf("wrong: run %ld word %d\n", run, i);
            exit(1);
        }
    }
}

int main(int argc, char **argv) {
    long runs = argc > 1 ? atol(argv[1]) : 1000;
    int steps = argc > 2 ? atoi(argv[2]) : 100;
    size_t bytes = (size_t)runs * APART * PAGE;
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    seeds = calloc(runs, sizeof *seeds);
    if (memory == MAP_FAILED || !seeds || madvise(memory, bytes, MADV_NOHUGEPAGE)) return 2;
    for (long run = 0; run < runs; run++) fill(run, run + 1);
    for (int step = 1; step <= steps; step++) {
        for (long run = step % 7; run < runs; run += 3 + step % 5) fill(run, run * 31 + step);
        check(runs);
        char line[128];
        // Long enough that it waits for who reads it before it gets to its end.
        int length = snprintf(line, sizeof line, "%016lx %d %0100d\n", nonce, step, 0);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    return 7;
}
