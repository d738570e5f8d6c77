// Tells steps, and makes threads when it is sent SIGUSR1. A child of its own leads a session, in
// which an orphan is.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 16 };
static volatile sig_atomic_t asked;

static void ask(int signal) {
    (void)signal;
    asked = 1;
}

static void *wait_for_ever(void *nothing) {
    for (;;) pause();
    return nothing;
}

static void rest(void) {
    for (;;) pause();
}

static void lead(int told) {
    setsid();
    pid_t between = fork();
    if (between == 0) {
        pid_t orphan = fork();
        if (orphan == 0) {
            close(told);
            rest();
        }
        _exit(write(told, &orphan, sizeof orphan) != sizeof orphan);
    }
    waitpid(between, 0, 0);
    close(told);
    rest();
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100, told[2];
    pid_t orphan, end;
    if (pipe(told)) return 1;
    pid_t leader = fork();
    if (leader == 0) lead(told[1]);
    close(told[1]);
    if (read(told[0], &orphan, sizeof orphan) != sizeof orphan) return 1;
    // Until the one between has been collected.
    if (read(told[0], &end, sizeof end) != 0) return 1;
    close(told[0]);
    signal(SIGUSR1, ask);
    for (int step = 1; step <= steps; step++) {
        printf("step %d\n", step);
        fflush(stdout);
        usleep(2000);
        pthread_t thread;
        for (int i = 0; asked && i < THREADS; i++)
            if (pthread_create(&thread, 0, wait_for_ever, 0)) return 1;
        asked = 0;
    }
    kill(orphan, SIGKILL);
    kill(leader, SIGKILL);
    waitpid(leader, 0, 0);
    return 7;
}
