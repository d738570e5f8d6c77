// Ends with a line that begins with "wrong" if stopping and cloning it can be noticed: a call that
// ends early, a child that it never made, memory that changed. SIGUSR1 asks it to end well.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile long counter;
// epoll_wait may end early: a tracer that is killed cannot set it back to its beginning
// (signal(7)).
static int interrupted;
static volatile sig_atomic_t done;

static void finish(int signal) { (void)signal, done = 1; }

static void check(int good, const char *what) {
    if (good) return;
    printf("wrong: %s (errno %d)\n", what, errno);
    fflush(stdout);
    _exit(1);
}

static void *worker(void *which) {
    long kind = (long)which % 4;
    int epoll = epoll_create1(0);
    while (!done) {
        struct timespec moment = {0, 5000000};
        struct epoll_event event;
        if (kind == 0) check(nanosleep(&moment, 0) == 0, "nanosleep ended early");
        if (kind == 1) check(poll(0, 0, 5) == 0, "poll ended early");
        if (kind == 2) check(epoll_wait(epoll, &event, 1, 5) == 0 || (interrupted && errno == EINTR), "epoll_wait ended early");
        // One writer, so that the counter only grows.
        if (kind == 3 && (long)which == 3) counter++;
        if (kind == 3) sched_yield();
    }
    return 0;
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 0;
    interrupted = argc > 2;
    pthread_t threads[64];
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    signal(SIGUSR1, finish);
    // The workers' calls are ended by nothing that the program does itself.
    pthread_sigmask(SIG_BLOCK, &set, 0);
    for (long i = 0; i < count; i++) check(!pthread_create(&threads[i], 0, worker, (void *)i), "pthread_create");
    printf("ready %p\n", (void *)&counter);
    fflush(stdout);
    while (!done) {
        pid_t child = fork();
        if (child == 0) usleep(1000), _exit(0);
        check(wait(0) == child, "wait saw another child");
        check(waitpid(-1, 0, __WALL) == -1 && errno == ECHILD, "a child is left over");
        if (!sigpending(&set) && sigismember(&set, SIGUSR1)) done = 1;
    }
    for (int i = 0; i < count; i++) pthread_join(threads[i], 0);
    printf("well %ld\n", counter);
    return 0;
}
