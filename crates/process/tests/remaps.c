// Maps, moves and unmaps neighbouring memory without rest: a mapping of which only a part is
// watched is two for mremap(2), which fails then (EFAULT).
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 64 };

static void fail(const char *what) {
    char line[64];
    int length = snprintf(line, sizeof line, "wrong: %s errno %d\n", what, errno);
    (void)!write(1, line, length);
    _exit(1);
}

static char *map(char *at, int pages) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    char *made = mmap(at, (size_t)pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (made != at) fail("mmap");
    memset(made, 7, PAGE);
    return made;
}

int main(void) {
    char *room = mmap(0, 4 * PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) fail("mmap");
    for (unsigned long round = 1;; round++) {
        // Of another length each time, and where the last one was.
        int pages = 2 + round % (PAGES - 2);
        char *first = map(room, pages), *moved = room + 2 * PAGES * PAGE;
        if (mremap(first, (size_t)pages * PAGE, (size_t)pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, moved) != moved)
            fail("mremap");
        if (munmap(moved, (size_t)pages * PAGE)) fail("munmap");
        if (round == 1 && write(1, "it runs\n", 8) != 8) return 2;
    }
}
