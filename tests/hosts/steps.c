// Prints a nonce that it draws at its start and the steps that it has done, with threads that keep
// a checked piece of memory changing. usage: steps COUNT MILLISECONDS THREADS MEGABYTES [FILE]
// FILE has as many bytes as steps may be done: it waits there until the file grows.
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static long step, done, threads;
static uint64_t *memory;
static size_t words;

// Each step, each thread adds the step's number to its part of the memory.
static void *work(void *argument) {
    long self = (long)argument, seen = 0;
    for (;;) {
        pthread_mutex_lock(&lock);
        while (step == seen) pthread_cond_wait(&turn, &lock);
        seen = step;
        pthread_mutex_unlock(&lock);
        for (size_t at = self; at < 4096; at += threads) memory[at] += seen;
        pthread_mutex_lock(&lock);
        done++;
        pthread_cond_broadcast(&turn);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

static void wait_until_allowed(const char *file, long number) {
    struct stat found;
    while (stat(file, &found) || found.st_size < number) usleep(5000);
}

int main(int count, char **words_of) {
    if (count != 5 && count != 6) return 2;
    long steps = atol(words_of[1]), pause = atol(words_of[2]), megabytes = atol(words_of[4]);
    threads = atol(words_of[3]);
    uint32_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 3;
    words = megabytes ? (size_t)megabytes << 17 : 4096;
    memory = malloc(words * 8);
    for (size_t at = 0; at < words; at++) memory[at] = at < 4096 ? 0 : at * 0x9e3779b97f4a7c15u;
    for (long at = 0; at < threads; at++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)at)) return 4;
    }
    printf("nonce %08x\n", nonce);
    fflush(stdout);
    for (long now = 1; now <= steps; now++) {
        if (count == 6) wait_until_allowed(words_of[5], now);
        pthread_mutex_lock(&lock);
        step = now;
        done = 0;
        pthread_cond_broadcast(&turn);
        while (done < threads) pthread_cond_wait(&turn, &lock);
        pthread_mutex_unlock(&lock);
        printf("%08x %ld\n", nonce, now);
        fflush(stdout);
        struct timespec time = {pause / 1000, pause % 1000 * 1000000};
        while (nanosleep(&time, &time)) {}
    }
    uint64_t expected = (uint64_t)steps * (steps + 1) / 2;
    for (size_t at = 0; at < words; at++) {
        uint64_t value = at < 4096 ? (threads ? expected : 0) : at * 0x9e3779b97f4a7c15u;
        if (memory[at] != value) {
            printf("%08x wrong at %zu\n", nonce, at);
            return 5;
        }
    }
    printf("%08x well\n", nonce);
    return 7;
}
