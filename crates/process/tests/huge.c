// As step.c, in huge pages of one kind or another; each line ends with what pages they are now.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REQUIRE(what) do { if (!(what)) wrong(__LINE__, #what); } while (0)

enum { HUGE_PAGE = 2 << 20, WORDS = HUGE_PAGE / 8 };
static const int HUGE_FLAGS = MAP_HUGETLB | 21 << 26;

static void wrong(int line, const char *what) {
    dprintf(1, "wrong: line %d: %s (errno %d)\n", line, what, errno);
    kill(0, SIGKILL);
    _exit(1);
}

static volatile uint64_t *map(size_t bytes, int flags, int fd) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (at == MAP_FAILED) {
        printf("not here: %s\n", strerror(errno));
        exit(0);
    }
    return at;
}

static const char *pages_at(volatile void *at) {
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[512];
    unsigned long start, end, kib;
    int inside = 0;
    while (file && fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) inside = start <= (unsigned long)at && (unsigned long)at < end;
        if (inside && sscanf(line, "KernelPageSize: %lu kB", &kib) == 1) {
            fclose(file);
            return kib > 4 ? "huge" : "ordinary";
        }
    }
    return "unmapped";
}

static void moment(void) {
    struct timespec moment = {0, 2000000};
    nanosleep(&moment, 0);
}

// What the other process is told, and what it tells; in ordinary memory.
static volatile uint64_t *told, *done;

// Has memory of its own that was its parent's, and writes it whenever it is told to.
static void heir(volatile uint64_t *words) {
    uint64_t first = words[1];
    for (uint64_t seen = 0;; moment()) {
        if (*told == UINT64_MAX) _exit(0);
        if (*told == seen) continue;
        REQUIRE(words[1] == first && words[2] == seen);
        words[2] = *told;
        *done = seen = *told;
    }
}

static void partner(volatile uint64_t *shared) {
    for (;; moment()) {
        if (*told == UINT64_MAX) _exit(0);
        shared[WORDS] = shared[3];
    }
}

static volatile uint64_t *words, *view;
static const char *kind;
static int fd = -1;
static pid_t other;

static int is(const char *name) { return strcmp(kind, name) == 0; }

static void set_up(void) {
    int own = MAP_PRIVATE | MAP_ANONYMOUS;
    told = map(4096, MAP_SHARED | MAP_ANONYMOUS, -1);
    done = told + 1;
    if (is("private")) words = map(3 * HUGE_PAGE, own | HUGE_FLAGS, -1);
    if (is("unreserved")) words = map(512l * HUGE_PAGE, own | MAP_NORESERVE | HUGE_FLAGS, -1);
    if (is("forked")) words = map(HUGE_PAGE, own | HUGE_FLAGS, -1);
    if (is("shared")) words = map(2 * HUGE_PAGE, MAP_SHARED | MAP_ANONYMOUS | HUGE_FLAGS, -1);
    if (is("memfd")) {
        fd = memfd_create("pages", MFD_HUGETLB | MFD_ALLOW_SEALING | 21 << 26);
        REQUIRE(fd >= 0 && ftruncate(fd, 2 * HUGE_PAGE) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        words = map(2 * HUGE_PAGE, MAP_SHARED, fd);
        words[WORDS] = 5;
        view = map(2 * HUGE_PAGE, MAP_PRIVATE, fd);
        view[WORDS] = 6;
    }
    if (is("segment")) {
        int id = shmget(IPC_PRIVATE, 3 << 20, SHM_HUGETLB | 21 << 26 | 0600);
        REQUIRE(id >= 0);
        words = shmat(id, 0, 0);
        REQUIRE(words != (void *)-1 && shmctl(id, IPC_RMID, 0) == 0);
        // Behind its length, in its last page.
        words[2 * WORDS - 1] = 7;
    }
    if (is("sparse")) {
        int id = shmget(IPC_PRIVATE, 8 * HUGE_PAGE, SHM_HUGETLB | SHM_NORESERVE | 21 << 26 | 0600);
        REQUIRE(id >= 0);
        words = shmat(id, 0, 0);
        REQUIRE(words != (void *)-1 && shmctl(id, IPC_RMID, 0) == 0);
    }
    REQUIRE(words);
    getrandom((void *)words, sizeof *words, 0);
    words[1] = words[0];
    if (is("forked") && !(other = fork())) heir(words);
    if (is("shared") && !(other = fork())) partner(words);
}

static void look(uint64_t step) {
    if (is("forked")) {
        *told = step;
        for (int i = 0; *done != step; i++, moment()) REQUIRE(i < 10000 && waitpid(other, 0, WNOHANG) == 0);
        REQUIRE(words[2] == 0);
    }
    if (is("shared")) {
        words[3] = step;
        for (int i = 0; words[WORDS] != step; i++, moment()) REQUIRE(i < 10000 && waitpid(other, 0, WNOHANG) == 0);
    }
    if (is("memfd")) {
        REQUIRE(fcntl(fd, F_GET_SEALS) == F_SEAL_SHRINK && lseek(fd, 0, SEEK_END) == 2 * HUGE_PAGE);
        REQUIRE(view[WORDS] == 6 && words[WORDS] == 5 && view[1] == words[1]);
    }
    if (is("segment")) REQUIRE(words[2 * WORDS - 1] == 7);
}

int main(int argc, char **argv) {
    kind = argv[1];
    int steps = atoi(argv[2]);
    set_up();
    double sum = 0;
    uint64_t value = words[0];
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = words[1] = words[1] * 6364136223846793005u + 1;
        if (is("memfd")) REQUIRE(view[1] == value);
        look(step);
        printf("%016lx %d %.17g %016lx %s\n", words[0], step, sum, value, pages_at(words));
        fflush(stdout);
        moment();
    }
    *told = UINT64_MAX;
    while (other && waitpid(other, 0, 0) > 0) {}
    return 7;
}
