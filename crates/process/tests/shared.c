// Two processes change memory that they share, in every way that there is, and check that each page
// is as it was left: one that came back as it was before, or not at all, says "wrong" and ends
// both.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, MOST = 8192 };

struct object {
    uint64_t seeds[MOST]; // what fills each page; 0: zeros
    uint64_t state;
};

static struct object *all;  // shared as well
static uint64_t *memory, *again;
static int pages, children;

static uint64_t draw(uint64_t below) {
    all->state = all->state * 6364136223846793005u + 1442695040888963407u;
    return (all->state >> 33) % below;
}

static void fail(const char *what, long a) {
    char line[128];
    int length = snprintf(line, sizeof line, "wrong: %s %ld errno %d\n", what, a, errno);
    if (write(1, line, length) != length) _exit(2);
    kill(0, SIGKILL);
    _exit(1);
}

static void fill(int index) {
    // By one of its mappings or the other.
    uint64_t *words = (draw(2) && again ? again : memory) + (size_t)index * WORDS;
    uint64_t seed = all->seeds[index] = draw(1u << 30) + 1;
    for (int i = 0; i < WORDS; i++) words[i] = seed & 1 ? seed * 0x9e3779b97f4a7c15u * (i + 1) : seed;
}

static void check(void) {
    for (int index = 0; index < pages; index++) {
        uint64_t seed = all->seeds[index], *words = memory + (size_t)index * WORDS;
        // Holes are rarely looked at: looking fills them.
        for (int i = 0; i < WORDS && (seed || draw(16) == 0); i++)
            if (words[i] != (seed & 1 ? seed * 0x9e3779b97f4a7c15u * (i + 1) : seed)) fail("page", index);
    }
}

static void step_once(void) {
    int from = draw(pages), count = 1 + draw(draw(8) ? 8 : pages / 4);
    if (count > pages - from) count = pages - from;
    char *at = (char *)memory + (size_t)from * PAGE;
    switch (draw(12)) {
    case 0: // a hole
        if (madvise(at, (size_t)count * PAGE, MADV_REMOVE)) fail("remove", from);
        memset(all->seeds + from, 0, count * sizeof *all->seeds);
        break;
    case 1: // what one has mapped no more, others still have
        if (madvise(at, (size_t)count * PAGE, MADV_DONTNEED)) fail("dontneed", from);
        break;
    case 2: { // a second mapping of the same, or no more of it
        if (again && munmap(again, (size_t)pages * PAGE)) fail("munmap", 0);
        again = again ? 0 : mremap(memory, 0, (size_t)pages * PAGE, MREMAP_MAYMOVE);
        if (again == MAP_FAILED) fail("mremap", 0);
        break;
    }
    case 3: { // elsewhere
        void *to = mmap(0, (size_t)pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memory = mremap(memory, (size_t)pages * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
        if (memory == MAP_FAILED) fail("move", 0);
        break;
    }
    case 4: // without leave to read for a moment
        if (mprotect(at, (size_t)count * PAGE, PROT_NONE) || mprotect(at, (size_t)count * PAGE, PROT_READ | PROT_WRITE))
            fail("mprotect", from);
        break;
    case 5: // by one that comes and goes
        if (children) {
            pid_t pid = fork();
            if (pid == 0) {
                for (int i = from; i < from + count; i++) fill(i);
                _exit(0);
            }
            // Whether or not it leaves something to wait for, this returns when it has ended.
            while (pid < 0 || (waitpid(pid, 0, 0) < 0 && errno == EINTR))
                if (pid < 0) fail("fork", 0);
            break;
        } // fallthrough
    default:
        for (int i = from; i < from + count; i++) fill(i);
    }
}

static void turn(void) {
    for (int i = 0; i < 3; i++) step_once();
    check();
}

static void *map(size_t bytes, int memfd) {
    int fd = -1, flags = MAP_SHARED | MAP_ANONYMOUS;
    if (memfd) {
        flags = MAP_SHARED;
        fd = syscall(SYS_memfd_create, "shared", 0u);
        if (fd < 0 || ftruncate(fd, bytes)) fail("memfd", fd);
    }
    void *made = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (made == MAP_FAILED) fail("mmap", bytes);
    if (fd >= 0) close(fd);
    return made;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[argc - 1]) : 100, memfd = argc > 2 && !strcmp(argv[1], "memfd");
    children = argc > 2 && (!strcmp(argv[1], "children") || !strcmp(argv[1], "forgotten"));
    // Their end is told to nobody.
    if (argc > 2 && !strcmp(argv[1], "forgotten")) signal(SIGCHLD, SIG_IGN);
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    all = map(sizeof *all, 0);
    all->state = nonce;
    pages = 1024 + draw(MOST - 1024);
    memory = map((size_t)pages * PAGE, memfd);
    int there[2], back[2];
    if (setpgid(0, 0) || pipe(there) || pipe(back)) return 2;
    if (fork() == 0) {
        char word;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (read(there[0], &word, 1) == 1) {
            turn();
            if (write(back[1], &word, 1) != 1) _exit(2);
        }
        _exit(0);
    }
    for (int step = 1; step <= steps; step++) {
        char line[64], word = 'x';
        turn();
        if (write(there[1], &word, 1) != 1 || read(back[0], &word, 1) != 1) fail("the other", step);
        check();
        int length = snprintf(line, sizeof line, "%016lx %d\n", nonce, step);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    return 7;
}
