// Forbids the middle of its memory, and later moves all of it: it is one mapping then (mremap(2)
// fails with EFAULT otherwise). Says when the middle is forbidden.
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 96 };

static void say(const char *what) {
    char line[64];
    int length = snprintf(line, sizeof line, "%s errno %d\n", what, errno);
    if (write(1, line, length) != length) _exit(2);
}

int main(void) {
    size_t length = PAGES * PAGE;
    char *at = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(at, 7, PAGE), memset(at + length - PAGE, 7, PAGE);
    char *middle = at + length / 3;
    if (mprotect(middle, length / 3, PROT_NONE)) return say("mprotect"), 1;
    say("forbidden");
    usleep(700000);
    // The last part first.
    at[length - 1]++, at[0]++;
    if (mprotect(middle, length / 3, PROT_READ | PROT_WRITE)) return say("mprotect"), 1;
    char *moved = mremap(at, length, 2 * length, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return say("mremap"), 1;
    if (moved[0] != 8 || moved[length - 1] != 8 || moved[length / 2]) return say("other bytes"), 1;
    say("moved");
    return 7;
}
