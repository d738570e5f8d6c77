// Draws a nonce, then counts steps, one line each. The nonce is said again with every step, out of
// memory that was there at the start: another program, or one that began anew, says another one.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t *nonce = malloc(1 << 20);
    getrandom(nonce, sizeof *nonce, 0);
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        char line[128];
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum, nonce[step]);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        if (nanosleep(&moment, 0)) return 3;
    }
    return 7;
}
