// Counts steps, and looks at each whether it can collect a child that somebody else kills. The
// child has threads, and memory enough for its end to take a while.
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

enum { THREADS = 8, BYTES = 64 << 20 };

static void *idle(void *unused) {
    for (;;) pause();
    return unused;
}

static void child(int ready) {
    pthread_t thread;
    memset(malloc(BYTES), 1, BYTES);
    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&thread, 0, idle, 0)) _exit(1);
    if (write(ready, "", 1) != 1) _exit(1);
    idle(0);
}

static int wrong(const char *what) {
    printf("wrong: %s\n", what);
    fflush(stdout);
    return 1;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100, ready[2], status, collected = 0;
    char byte;
    if (pipe(ready)) return wrong("no pipe");
    pid_t pid = fork();
    if (!pid) child(ready[1]);
    if (pid < 0 || read(ready[0], &byte, 1) != 1) return wrong("no child");
    uint64_t nonce, value;
    double sum = 0;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        fflush(stdout);
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
        pid_t found = collected ? 0 : waitpid(pid, &status, WNOHANG);
        if (found < 0) return wrong("the child is gone");
        if (!found) continue;
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) return wrong("the child ended otherwise");
        collected = 1;
    }
    return collected ? 7 : wrong("the child lives");
}
