// Changes its memory in every way that a mapping knows, at random, and checks that each page is as
// it was left: a page that came back as it was before, or not at all, says "wrong" and ends it.
// Without processes of its own where CHILDLESS is set.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { REGIONS = 10, MOST = 3072, PAGE = 4096, WORDS = PAGE / 8 };

struct region {
    uint64_t *at;
    int pages;
    uint64_t seed[MOST]; // what fills each page; 0: zeros
};

static struct region *regions[REGIONS], *heap;
static uint64_t state;

static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static void fail(const char *what, long a, long b) {
    char line[128];
    int length = snprintf(line, sizeof line, "wrong: %s %ld %ld errno %d\n", what, a, b, errno);
    if (write(1, line, length) != length) _exit(2);
    _exit(1);
}

static uint64_t *page(struct region *r, int index) { return r->at + (size_t)index * WORDS; }

static void fill(struct region *r, int index) {
    uint64_t seed = r->seed[index] = draw(7) ? draw(1u << 30) + 1 : 0;
    uint64_t *words = page(r, index);
    // Some pages are random, some compress.
    for (int i = 0; i < WORDS; i++) words[i] = seed & 1 ? seed * 0x9e3779b97f4a7c15u * (i + 1) : seed;
}

static void check(struct region *r, int index) {
    uint64_t seed = r->seed[index], *words = page(r, index);
    for (int i = 0; i < WORDS; i++) {
        uint64_t expected = seed & 1 ? seed * 0x9e3779b97f4a7c15u * (i + 1) : seed;
        if (words[i] != expected) fail("page", index, (long)(r - regions[0]));
    }
}

static void forget(struct region *r, int from, int count) {
    memset(r->seed + from, 0, count * sizeof *r->seed);
}

static uint64_t *map(void *at, int pages, int flags) {
    void *made = mmap(at, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (made == MAP_FAILED) fail("mmap", pages, flags);
    // Where there are huge pages, some are.
    if (draw(2)) madvise(made, (size_t)pages * PAGE, MADV_HUGEPAGE);
    return made;
}

static void write_some(struct region *r) {
    int from = draw(r->pages), count = 1 + draw(draw(8) ? 8 : r->pages);
    for (int i = from; i < r->pages && i < from + count; i++) fill(r, i);
}

static void drop(struct region *r) {
    int from = draw(r->pages), count = 1 + draw(draw(2) ? r->pages : 16);
    if (count > r->pages - from) count = r->pages - from;
    if (madvise(page(r, from), (size_t)count * PAGE, MADV_DONTNEED)) fail("madvise", from, count);
    forget(r, from, count);
}

static void map_again(struct region *r) {
    if (munmap(r->at, (size_t)r->pages * PAGE)) fail("munmap", 0, 0);
    map(r->at, r->pages, MAP_FIXED_NOREPLACE);
    forget(r, 0, r->pages);
    write_some(r);
}

static void resize(struct region *r) {
    int pages = 1 + draw(MOST), kept = pages < r->pages ? pages : r->pages;
    // In place if it can, else elsewhere.
    void *moved = mremap(r->at, (size_t)r->pages * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) fail("mremap", r->pages, pages);
    forget(r, kept, MOST - kept);
    r->at = moved, r->pages = pages;
}

static void protect(struct region *r) {
    int from = draw(r->pages), count = 1 + draw(r->pages - from);
    if (mprotect(page(r, from), (size_t)count * PAGE, PROT_NONE)) fail("mprotect", from, count);
    if (mprotect(page(r, from), (size_t)count * PAGE, PROT_READ | PROT_WRITE)) fail("mprotect", from, count);
}

static void grow_heap(void) {
    int pages = 1 + draw(200);
    if (brk((char *)heap->at + (size_t)pages * PAGE)) fail("brk", heap->pages, pages);
    for (int i = heap->pages; i < pages; i++) fill(heap, i);
    if (pages < heap->pages) forget(heap, pages, heap->pages - pages);
    heap->pages = pages;
}

static void check_all(void) {
    // Zeros are rarely looked at: what is dropped must stay without a page for a while.
    int zeros = draw(8) == 0;
    for (int i = 0; i < REGIONS; i++)
        for (int j = 0; j < regions[i]->pages; j++)
            if (zeros || regions[i]->seed[j]) check(regions[i], j);
    for (int j = 0; j < heap->pages; j++) check(heap, j);
}

// What a child writes is its own.
static void child(void) {
    pid_t pid = fork();
    if (pid == 0) {
        check_all();
        for (int i = 0; i < REGIONS; i++) write_some(regions[i]);
        check_all();
        _exit(0);
    }
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status) fail("child", pid, status);
}

static void step_once(void) {
    struct region *r = regions[draw(REGIONS)];
    switch (draw(16)) {
    case 0: drop(r); break;
    case 1: map_again(r); break;
    case 2: resize(r); break;
    case 3: protect(r); break;
    case 4: grow_heap(); break;
    case 5: if (draw(4) == 0 && !getenv("CHILDLESS")) child(); break;
    default: write_some(r);
    }
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    state = nonce;
    // Not from malloc: the heap's end is this program's.
    struct region *all = (void *)map(0, (REGIONS + 1) * sizeof(struct region) / PAGE + 1, 0);
    for (int i = 0; i < REGIONS; i++) {
        regions[i] = all + i;
        regions[i]->pages = 1 + draw(MOST);
        regions[i]->at = map(0, regions[i]->pages, 0);
    }
    heap = all + REGIONS;
    heap->at = (uint64_t *)(((uintptr_t)sbrk(0) + PAGE - 1) & -PAGE);
    grow_heap();
    for (int step = 1; step <= steps; step++) {
        for (int i = 0; i < 4; i++) step_once();
        check_all();
        char line[64];
        int length = snprintf(line, sizeof line, "%016lx %d\n", nonce, step);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    return 7;
}
