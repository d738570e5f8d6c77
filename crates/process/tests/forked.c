// A process and those that it has forked share 64 MiB, of which each changes, unmaps, moves or
// protects some. All check at each step that every page is as they left it: one that is not says
// "wrong" and ends them. Each step's line says how much memory they take together, in KiB: a page
// that several share counts once.
//
// forked KIND STEPS; KIND: "family", or "orphans", whose first parent has ended.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, PAGES = 16384, SOME = 2048, FEW = 64, ALL = 7 };

// What a page is filled with: 0 is zeros, GONE is no page.
enum { GONE = 255 };

struct region {
    uint64_t *memory;
    int pages;
    uint8_t owner[PAGES];
};

static struct table {
    volatile long pss[ALL];
    volatile long steps[ALL];
    volatile int done;
} *all;  // shared

static struct region large, wiped, alone, sealed, cut;
// How many mappings `cut` is of this process's.
static int self, pieces = 1;

static void fail(const char *what, long a) {
    char line[128];
    int length = snprintf(line, sizeof line, "wrong: process %d, %s %ld, errno %d\n", self, what, a, errno);
    if (write(1, line, length) != length) _exit(2);
    kill(0, SIGKILL);
    _exit(1);
}

static uint64_t word(int owner, int page, int i) {
    return owner ? (uint64_t)(owner * 1000003 + page) * 0x9e3779b97f4a7c15u * (i + 1) : 0;
}

static void fill(struct region *region, int from, int count, int owner) {
    for (int page = from; page < from + count; page++) {
        region->owner[page] = owner;
        for (int i = 0; i < WORDS; i++) region->memory[(size_t)page * WORDS + i] = word(owner, page, i);
    }
}

static void check(struct region *region, const char *name) {
    for (int page = 0; page < region->pages; page++) {
        int owner = region->owner[page];
        if (owner == GONE) continue;
        for (int i = 0; i < WORDS; i++)
            if (region->memory[(size_t)page * WORDS + i] != word(owner, page, i)) fail(name, page);
    }
}

static void *at(struct region *region, int page) { return region->memory + (size_t)page * WORDS; }

static struct region map(int pages) {
    struct region region = { .pages = pages };
    // Between pages without access, so that it joins none of its neighbours by the chance of
    // addresses.
    uint8_t *room = mmap(NULL, (size_t)(pages + 2) * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) fail("mmap", pages);
    region.memory = (uint64_t *)(room + PAGE);
    if (mprotect(region.memory, (size_t)pages * PAGE, PROT_READ | PROT_WRITE)) fail("mprotect", pages);
    fill(&region, 0, pages, 100);
    return region;
}

static void count_pieces(struct region *region, int expected) {
    char line[512];
    uintptr_t from = (uintptr_t)region->memory, to = from + (size_t)region->pages * PAGE, start, end;
    int count = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "%lx-%lx", &start, &end) == 2 && start < to && from < end) count++;
    if (!file || count != expected) fail("pieces", count);
    fclose(file);
}

static long pss(void) {
    char line[256];
    long kib = -1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "Pss_Anon: %ld", &kib);
    if (!file || kib < 0) fail("pss", kib);
    fclose(file);
    return kib;
}

static void child(int number) {
    self = number;
    if (prctl(PR_SET_PDEATHSIG, SIGKILL)) fail("prctl", 0);
    // MADV_WIPEONFORK: zeros; MADV_DONTFORK: nothing.
    memset(wiped.owner, 0, sizeof wiped.owner);
    memset(alone.owner, GONE, sizeof alone.owner);
    for (int page = number; page < PAGES; page += 64) fill(&large, page, 1, number);
}

static void be_different(void) {
    switch (self) {
    case 5:
        // One part is gone, one cannot be written, one cannot be read.
        if (munmap(at(&large, 2000), 1000 * PAGE)) fail("munmap", 0);
        memset(large.owner + 2000, GONE, 1000);
        if (mprotect(at(&large, 4000), 1000 * PAGE, PROT_READ)) fail("mprotect", 0);
        if (mprotect(at(&large, 6000), 10 * PAGE, PROT_NONE)) fail("mprotect", 1);
        memset(large.owner + 6000, GONE, 10);
        break;
    case 2:
        // Zeros, and a page among them.
        if (madvise(at(&large, 8000), 500 * PAGE, MADV_DONTNEED)) fail("madvise", 0);
        memset(large.owner + 8000, 0, 500);
        fill(&large, 8100, 1, 2);
        // Its first own page in memory that its maker and its child have in common, and that it
        // cannot write any more.
        fill(&sealed, 3, 1, 2);
        if (mprotect(sealed.memory, FEW * PAGE, PROT_READ)) fail("mprotect", 2);
        // Two mappings of what is one of its child's, and cut elsewhere in the first process.
        if (mprotect(cut.memory, SOME / 2 * PAGE, PROT_READ)) fail("mprotect", 3);
        pieces = 2;
        break;
    case 3: {
        // Others' pages at another place, and new memory in their place.
        void *there = mmap(NULL, 256 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (there == MAP_FAILED) fail("mmap", 0);
        if (mremap(at(&large, 9000), 256 * PAGE, 256 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, there) != there) fail("mremap", 0);
        for (int page = 0; page < 256; page++)
            for (int i = 0; i < WORDS; i++)
                if (((uint64_t *)there)[page * WORDS + i] != word(large.owner[9000 + page], 9000 + page, i)) fail("moved", page);
        void *new = mmap(at(&large, 9000), 256 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        if (new == MAP_FAILED) fail("mmap", 1);
        fill(&large, 9000, 100, 3);
        memset(large.owner + 9100, 0, 156);
        break;
    }
    }
}

static void wait_ms(int ms) {
    struct timespec pause = { 0, ms * 1000000L };
    while (nanosleep(&pause, &pause) && errno == EINTR) {}
}

static void live(void) {
    be_different();
    while (!all->done) {
        check(&large, "page");
        check(&wiped, "wiped page");
        check(&alone, "page of its own");
        check(&sealed, "sealed page");
        check(&cut, "page of a cut mapping");
        count_pieces(&cut, pieces);
        all->pss[self] = pss();
        all->steps[self]++;
        wait_ms(20);
    }
    while (wait(NULL) > 0) {}
    _exit(0);
}

static void make(int orphans) {
    large = map(PAGES), wiped = map(FEW), alone = map(FEW), sealed = map(FEW), cut = map(SOME);
    if (madvise(wiped.memory, FEW * PAGE, MADV_WIPEONFORK)) fail("madvise", 1);
    if (madvise(alone.memory, FEW * PAGE, MADV_DONTFORK)) fail("madvise", 2);
    for (int number = 1; number < ALL - 1; number++) {
        if (fork()) continue;
        child(number);
        if (orphans && prctl(PR_SET_PDEATHSIG, 0)) fail("prctl", 1);
        // A grandchild, made in between.
        if (number == 2 && fork() == 0) {
            child(ALL - 1);
            live();
        }
        live();
    }
}

int main(int argc, char **argv) {
    int orphans = argc > 2 && strcmp(argv[1], "orphans") == 0, steps = argc > 2 ? atoi(argv[2]) : 0;
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED || setpgid(0, 0) || prctl(PR_SET_CHILD_SUBREAPER, 1)) fail("start", 0);
    if (!orphans) {
        make(0);
        // What the first one changes itself.
        for (int page = 40; page < PAGES; page += 64) fill(&large, page, 1, 101);
        if (mprotect(cut.memory, SOME / 4 * PAGE, PROT_READ) || mprotect(at(&cut, SOME / 4), PAGE, PROT_NONE)) fail("mprotect", 4);
        cut.owner[SOME / 4] = GONE, pieces = 3;
    } else {
        pid_t parent = fork();
        if (parent == 0) {
            make(1);
            wait_ms(200);
            _exit(0);
        }
        waitpid(parent, NULL, 0);
    }
    for (int number = 1; number <= steps; number++) {
        long before[ALL], sum = 0;
        for (int i = 1; i < ALL; i++) before[i] = all->steps[i];
        for (int i = 1; i < ALL; i++)
            while (all->steps[i] < before[i] + 2) wait_ms(1);
        if (!orphans) {
            check(&large, "page"), check(&wiped, "wiped page"), check(&alone, "page of its own"), check(&sealed, "sealed page");
            check(&cut, "page of a cut mapping"), count_pieces(&cut, pieces);
        }
        all->pss[0] = pss();
        for (int i = 0; i < ALL; i++) sum += all->pss[i];
        printf("step %d %ld\n", number, sum);
        fflush(stdout);
    }
    all->done = 1;
    while (wait(NULL) > 0) {}
    return 7;
}
