// As step.c, beside a thread that writes to all of a large memory again and again; each page has
// the same number everywhere, whenever it stands still.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 512, PAGES = 48 << 10 };
static uint64_t memory[PAGES][WORDS];
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;
static volatile int round_ = 1;

static void *writer(void *unused) {
    (void)unused;
    for (;; round_++)
        for (int page = 0; page < PAGES; page++) {
            pthread_mutex_lock(&writing);
            memory[page][1] = round_, memory[page][WORDS - 1] = round_;
            pthread_mutex_unlock(&writing);
        }
    return NULL;
}

static void check(void) {
    pthread_mutex_lock(&writing);
    for (int page = 0; page < PAGES; page++)
        if (memory[page][1] != memory[page][WORDS - 1]) {
            printf("wrong: page %d\n", page);
            exit(1);
        }
    pthread_mutex_unlock(&writing);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 1;
    uint64_t value = nonce;
    double sum = 0;
    pthread_t thread;
    if (pthread_create(&thread, NULL, writer, NULL)) return 1;
    while (round_ < 2) usleep(1000);
    for (int step = 1; step <= steps; step++) {
        value = value * 6364136223846793005u + 1;
        sum += 1.0 / step;
        if (step % 16 == 0) check();
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        fflush(stdout);
        nanosleep(&(struct timespec){0, 5000000}, NULL);
    }
    return 7;
}
