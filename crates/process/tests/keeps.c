// Fills memory once, and looks at all of it with every step: none of it is dropped before it was
// needed.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 32 << 17 };

static uint64_t word(long index) { return (uint64_t)(index + 1) * 0x9e3779b97f4a7c15u; }

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t *words = mmap(0, WORDS * sizeof *words, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) return 2;
    for (long i = 0; i < WORDS; i++) words[i] = word(i);
    for (int step = 1; step <= steps; step++) {
        for (long i = 0; i < WORDS; i++)
            if (words[i] != word(i)) return 1;
        char line[64];
        int length = snprintf(line, sizeof line, "kept %d\n", step);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    return 7;
}
