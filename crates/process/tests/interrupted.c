// As step.c, for a program that takes EINTR for the end: it waits for each step in another call.
#include <errno.h>
#include <poll.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/select.h>
#include <sys/sem.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int ends[2];

static void fail(const char *what) {
    printf("wrong %s: errno %d\n", what, errno);
    exit(1);
}

// Waits for some milliseconds, in a call that nothing should end early.
static void wait_in(int kind, int epoll) {
    struct timespec moment = {0, 3000000};
    struct timeval short_time = {0, 3000};
    struct epoll_event event;
    char byte;
    sem_t semaphore;
    if (kind == 0 && nanosleep(&moment, 0)) fail("nanosleep");
    if (kind == 1 && clock_nanosleep(CLOCK_MONOTONIC, 0, &moment, 0)) fail("clock_nanosleep");
    if (kind == 2 && poll(0, 0, 3)) fail("poll");
    if (kind == 3 && select(0, 0, 0, 0, &short_time)) fail("select");
    if (kind == 4 && epoll_wait(epoll, &event, 1, 3)) fail("epoll_wait");
    if (kind == 5) {
        sem_init(&semaphore, 0, 0);
        clock_gettime(CLOCK_REALTIME, &moment);
        if ((moment.tv_nsec += 3000000) >= 1000000000) moment.tv_nsec -= 1000000000, moment.tv_sec++;
        if (sem_timedwait(&semaphore, &moment) != -1 || errno != ETIMEDOUT) fail("sem_timedwait");
    }
    if (kind == 6) {
        // A child ends while it is waited for; its SIGCHLD is ignored.
        pid_t child = fork();
        if (!child) usleep(3000), _exit(5);
        int status;
        if (waitpid(child, &status, 0) != child || WEXITSTATUS(status) != 5) fail("waitpid");
    }
    if (kind == 7) {
        pid_t child = fork();
        if (!child) usleep(3000), (void)!write(ends[1], "x", 1), _exit(0);
        if (read(ends[0], &byte, 1) != 1 || byte != 'x') fail("read");
        if (waitpid(child, 0, 0) != child) fail("waitpid");
    }
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100, epoll = epoll_create1(0);
    if (pipe(ends)) return 2;
    setvbuf(stdout, 0, _IONBF, 0);
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        wait_in(step % 8, epoll);
    }
    return 7;
}
