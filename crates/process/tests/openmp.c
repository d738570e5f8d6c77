// As step.c; each step's sum is added up by OpenMP's threads, while every signal is blocked.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, 0);
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0;
    static double parts[4096];
    for (int step = 1; step <= steps; step++) {
        // Exact in any order: powers of two.
        double whole = 0;
#pragma omp parallel for num_threads(4) reduction(+ : whole) schedule(dynamic, 7)
        for (int i = 0; i < 4096; i++) parts[i] += 1, whole += parts[i];
        if (whole != 4096.0 * step) return printf("wrong %f\n", whole), 1;
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        if (write(1, line, length) != length) return 2;
        usleep(1000);
    }
    return 7;
}
