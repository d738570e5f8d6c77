// As step.c; wrong if a clock that counts from the machine's start goes back, or forth by eight
// seconds.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const clockid_t clocks[] = {CLOCK_MONOTONIC, CLOCK_BOOTTIME};

// By the vDSO and by the kernel, which must agree.
static double now(clockid_t clock, int by_kernel) {
    struct timespec time;
    if (by_kernel) syscall(SYS_clock_gettime, clock, &time);
    else clock_gettime(clock, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0, last[2] = {now(clocks[0], 0), now(clocks[1], 0)};
    for (int step = 1; step <= steps; step++) {
        for (int i = 0; i < 4; i++) {
            double time = now(clocks[i / 2], i % 2), gap = time - last[i / 2];
            if (gap < 0 || gap > 8) return printf("wrong %d %f\n", i, gap), 1;
            last[i / 2] = time;
        }
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        if (nanosleep(&moment, 0)) return 3;
    }
    return 7;
}
