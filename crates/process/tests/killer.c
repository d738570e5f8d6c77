// Counts steps without ever sleeping, and kills its children the moment that it is restarted: they
// may not have been let go by then. Each has many threads. It then waits for them, and goes on.
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CHILDREN = 4, THREADS = 150 };
static pid_t children[CHILDREN];
static char begun_in[64];

static void wrong(const char *what) {
    printf("wrong: %s\n", what);
    fflush(stdout);
    _exit(1);
}

static void *idle(void *unused) {
    for (;;) pause();
    return unused;
}

static void child(void) {
    pthread_t thread;
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&thread, 0, idle, 0)) _exit(1);
    idle(0);
}

/* The namespace of its ids: another one after a restart. */
static void look(char *name, size_t size) {
    ssize_t length = readlink("/proc/self/ns/pid", name, size - 1);
    if (length < 0) wrong("no namespace");
    name[length] = 0;
}

static void kill_if_restarted(void) {
    char now[64];
    look(now, sizeof now);
    if (!children[0] || !strcmp(now, begun_in)) return;
    for (int i = 0; i < CHILDREN; i++)
        if (kill(children[i], SIGKILL)) wrong("a child is gone");
    for (int i = 0; i < CHILDREN; i++) {
        int status;
        if (waitpid(children[i], &status, 0) != children[i]) wrong("a child is not collected");
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) wrong("a child ended otherwise");
    }
    children[0] = 0;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce, value;
    double sum = 0;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    look(begun_in, sizeof begun_in);
    for (int i = 0; i < CHILDREN; i++)
        if (!(children[i] = fork())) child();
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        fflush(stdout);
        struct timespec begin, now;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        do {
            kill_if_restarted();
            clock_gettime(CLOCK_MONOTONIC, &now);
        } while ((now.tv_sec - begin.tv_sec) * 1000000000 + now.tv_nsec - begin.tv_nsec < 2000000);
    }
    if (children[0]) wrong("it was not restarted");
    return 7;
}
