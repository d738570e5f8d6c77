// Puts guards into its memory, of which half is shared, and takes them away, and checks that each
// page is a guard or holds what was written last: anything else says "wrong" and ends it.
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { PAGES = 512, PAGE = 4096, INSTALL = 102, REMOVE = 103 };

static char *memory, *shared;
static uint64_t state, values[PAGES];
static char guarded[PAGES];
static int ends[2];

static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static char *place(int page) {
    return page < PAGES / 2 ? memory + (size_t)page * PAGE : shared + (size_t)(page - PAGES / 2) * PAGE;
}

static void check(int page) {
    uint64_t found = 0;
    int fault = write(ends[1], place(page), 8) < 0 && errno == EFAULT;
    if (!fault && read(ends[0], &found, 8) != 8) _exit(2);
    if (fault == guarded[page] && (fault || found == values[page])) return;
    char line[128];
    int length = snprintf(line, sizeof line, "wrong: page %d %d %d %lx %lx\n", page, fault, guarded[page], found, values[page]);
    _exit(write(1, line, length) == length ? 1 : 2);
}

static void change(int page) {
    char *at = place(page);
    if (draw(2) && !guarded[page]) {
        values[page] = *(uint64_t *)at = draw(1u << 30);
    } else if (!madvise(at, PAGE, guarded[page] ? REMOVE : INSTALL)) {
        // Old kernels know none.
        guarded[page] = !guarded[page];
        // A private page is gone; the shared memory still has it.
        if (page < PAGES / 2) values[page] = 0;
    }
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    int both = PROT_READ | PROT_WRITE;
    memory = mmap(0, PAGES / 2 * PAGE, both, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int file = memfd_create("guards", 0);
    if (file < 0 || ftruncate(file, PAGES / 2 * PAGE)) return 2;
    shared = mmap(0, PAGES / 2 * PAGE, both, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED || shared == MAP_FAILED || pipe(ends)) return 2;
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    state = nonce;
    for (int step = 1; step <= steps; step++) {
        for (int i = 0; i < 20; i++) change(draw(PAGES));
        for (int page = 0; page < PAGES; page++) check(page);
        char line[64];
        int length = snprintf(line, sizeof line, "%016lx %d\n", nonce, step);
        if (write(1, line, length) != length) return 2;
        usleep(2000);
    }
    return 7;
}
