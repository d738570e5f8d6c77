// As step.c, with 40 children that each fill memory of their own. At each step all of them say what
// theirs holds: nobody has another one's, or none.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 40, WORDS = 1 << 15 };

static uint64_t next(uint64_t value) { return value * 6364136223846793005u + 1442695040888963407u; }

static uint64_t sum_of(const uint64_t *words) {
    uint64_t sum = 0;
    for (int at = 0; at < WORDS; at++) sum = next(sum ^ words[at]);
    return sum;
}

static void fill(uint64_t *words, uint64_t value) {
    for (int at = 0; at < WORDS; at++) words[at] = value = next(value);
}

// Answers with the sum until nobody asks.
static void answer(int socket, uint64_t seed) {
    uint64_t *words = malloc(WORDS * sizeof *words), asked;
    fill(words, seed);
    while (read(socket, &asked, sizeof asked) == sizeof asked) {
        asked += sum_of(words);
        if (write(socket, &asked, sizeof asked) != sizeof asked) _exit(1);
    }
    _exit(0);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100, sockets[COUNT];
    uint64_t *nonce = malloc(1 << 20), sums[COUNT];
    getrandom(nonce, sizeof *nonce, 0);
    uint64_t *words = malloc(WORDS * sizeof *words);
    for (int child = 0; child < COUNT; child++) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends)) return 4;
        if (fork() == 0) {
            close(ends[0]);
            for (int other = 0; other < child; other++) close(sockets[other]);
            answer(ends[1], nonce[0] + child);
        }
        close(ends[1]);
        sockets[child] = ends[0];
        fill(words, nonce[0] + child);
        sums[child] = sum_of(words);
    }
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        for (int child = 0; child < COUNT; child++) {
            uint64_t said = step;
            if (write(sockets[child], &said, sizeof said) != sizeof said) return 5;
            if (read(sockets[child], &said, sizeof said) != sizeof said || said != sums[child] + step) {
                printf("wrong %d\n", child);
                return 6;
            }
        }
        char line[128];
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum, nonce[step]);
        if (write(1, line, length) != length) return 2;
    }
    for (int child = 0; child < COUNT; child++) close(sockets[child]);
    while (wait(0) > 0) { }
    return 7;
}
