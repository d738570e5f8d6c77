// When it is told to (SIGUSR1), writes a page of shared memory by a mapping in the place of another
// page, and has that one there again. Ends some moments later, with 7 if all of its memory is as it
// was left.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 512, FROM = 2, WRITTEN = 5 };

static volatile sig_atomic_t told;

static void tell(int signal) {
    told = signal;
}

int main(void) {
    char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    memset(memory, 1, PAGES * PAGE);
    signal(SIGUSR1, tell);
    puts("ready");
    fflush(stdout);
    while (!told) usleep(2000);
    char *place = memory + FROM * PAGE;
    if (remap_file_pages(place, PAGE, 0, WRITTEN, 0)) return 3;
    memset(place, 77, PAGE);
    if (remap_file_pages(place, PAGE, 0, FROM, 0)) return 4;
    puts("written");
    fflush(stdout);
    for (int moment = 0; moment < 1000; moment++) usleep(2000);
    for (int page = 0; page < PAGES; page++)
        if (memory[page * PAGE] != (page == WRITTEN ? 77 : 1)) return 5;
    return 7;
}
