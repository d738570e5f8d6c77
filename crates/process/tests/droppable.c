// A process that has memory which the kernel may drop (MAP_DROPPABLE) where its child still has
// what both had before. It says "step 1" before it maps the second half of that, and waits for
// SIGUSR1. Both check their memory at each step. Ends with 77 where the kernel has no such memory.
//
// droppable STEPS
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef MAP_DROPPABLE
#define MAP_DROPPABLE 8
#endif

enum { PAGE = 4096, PAGES = 64, WORDS = PAGE / 8, FIRST = 10, FEW = 8, SECOND = FIRST + FEW };

static uint64_t *memory;

static uint64_t word(int page, int i) { return (uint64_t)(page + 7) * 0x9e3779b97f4a7c15u * (i + 1); }

static void fail(const char *what) {
    printf("wrong: %s, errno %d\n", what, errno);
    fflush(stdout);
    _exit(1);
}

static void fill(int from, int count) {
    for (int page = from; page < from + count; page++)
        for (int i = 0; i < WORDS; i++) memory[page * WORDS + i] = word(page, i);
}

static int is_droppable(int page) {
    return (page >= FIRST && page < FIRST + FEW) || (page >= SECOND && page < SECOND + FEW);
}

static void check(int all) {
    for (int page = 0; page < PAGES; page++)
        for (int i = 0; (all || !is_droppable(page)) && i < WORDS; i++)
            if (memory[page * WORDS + i] != word(page, i)) fail("a page");
}

// The same bytes as before, in memory that may be dropped.
static int drop(int page) {
    int flags = MAP_ANONYMOUS | MAP_DROPPABLE | MAP_FIXED;
    if (mmap(memory + page * WORDS, FEW * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) return 0;
    fill(page, FEW);
    return 1;
}

static void wait_ms(int ms) {
    struct timespec pause = { 0, ms * 1000000L };
    while (nanosleep(&pause, &pause) && errno == EINTR) {}
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 0;
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    sigprocmask(SIG_BLOCK, &one, NULL);
    memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    fill(0, PAGES);
    pid_t parent = getpid(), child = fork();
    while (child == 0) {
        check(1);
        wait_ms(5);
        if (getppid() != parent) _exit(3);
    }
    if (!drop(FIRST)) {
        kill(child, SIGKILL);
        return 77;
    }
    printf("step 1 of a program with droppable memory\n");
    fflush(stdout);
    int signal;
    sigwait(&one, &signal);
    if (!drop(SECOND)) fail("droppable");
    for (int number = 2; number <= steps; number++) {
        check(0);
        if (waitpid(child, NULL, WNOHANG) != 0) fail("the child has ended");
        printf("step %d of a program with droppable memory\n", number);
        fflush(stdout);
        wait_ms(5);
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    return 7;
}
