// Changes memory that two processes share in a way that page tables do not tell, a part at each
// step, and checks all of it: "removed" takes pages out and looks at them, "twice" writes by a
// second mapping that comes and goes, "firstless" does so without its first thread, "dropped" has
// what it has written mapped no more.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PARTS = 64, UNSEEN = 16, PART = 2 << 20 };

static char *memory;

static void fail(const char *what, int part) {
    printf("wrong: %s of part %d\n", what, part);
    fflush(stdout);
    kill(0, SIGKILL);
}

static void change(const char *how, int part, char now) {
    char *at = memory + (size_t)part * PART;
    if (!strcmp(how, "removed")) {
        if (madvise(at, PART, MADV_REMOVE)) fail("removal", part);
    } else if (strcmp(how, "dropped")) {
        char *again = mremap(at, 0, PART, MREMAP_MAYMOVE);
        if (again == MAP_FAILED) fail("mapping", part);
        memset(again, now, PART);
        munmap(again, PART);
    } else {
        memset(at, now, PART);
        if (madvise(at, PART, MADV_DONTNEED)) fail("dropping", part);
    }
}

static const char *how;
static int steps;
static char is[PARTS];

static void *work(void *other) {
    int changed[PARTS] = {0};
    for (int step = 1; step <= steps; step++) {
        int part = step % PARTS;
        change(how, part, step);
        is[part] = changed[part] = step;
        if (!strcmp(how, "removed")) {
            // Zeros, until it is filled again.
            int next = (part + PARTS / 2) % PARTS;
            is[part] = 0;
            memset(memory + (size_t)next * PART, is[next] = step, PART);
        }
        for (int other = 0; other < PARTS; other++) {
            // What is looked at is mapped again.
            if (!strcmp(how, "dropped") && changed[other] && step - changed[other] < UNSEEN) continue;
            for (int page = 0; page < PART; page += PAGE)
                if (memory[(size_t)other * PART + page] != is[other]) fail("a page", other);
        }
        if (printf("%016x %d\n", 7, step) < 0 || fflush(stdout)) exit(2);
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    kill(*(pid_t *)other, SIGKILL);
    exit(7);
}

int main(int argc, char **argv) {
    if (argc != 3 || setpgid(0, 0)) return 2;
    how = argv[1];
    steps = atoi(argv[2]);
    // One page table maps a part.
    char *all = mmap(0, (PARTS + 1) * (size_t)PART, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memory = (char *)(((size_t)all + PART - 1) / PART * PART);
    memory = mmap(memory, PARTS * (size_t)PART, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (int part = 0; part < PARTS; part++) memset(memory + (size_t)part * PART, is[part] = -1, PART);
    static pid_t other;
    other = fork();
    if (other == 0) {
        // Its parent's death would be that of the thread that has made it.
        pid_t parent = getppid();
        while (getppid() == parent) usleep(50000);
        _exit(0);
    }
    if (strcmp(how, "firstless")) work(&other);
    pthread_t thread;
    if (pthread_create(&thread, 0, work, &other)) return 2;
    pthread_exit(0);
}
