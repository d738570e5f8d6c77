// Writes files in the folder that it is given and holds them in three ways; then counts steps, and
// checks in each that they are what it has written.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { HELD = 1 << 20, KEPT = 256 << 10, LOG = 100 };

static int make(const char *name, char byte, size_t size) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0640);
    char *bytes = malloc(size);
    memset(bytes, byte, size);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size) exit(3);
    free(bytes);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 3 || chdir(argv[1])) return 2;
    long steps = atol(argv[2]);
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    int held = make("held", 'h', HELD), kept = make("kept", 'k', KEPT), log = make("log", 'l', LOG);
    const char *map = mmap(0, KEPT, PROT_READ | PROT_WRITE, MAP_SHARED, kept, 0);
    close(kept);
    printf("nonce %016lx\n", nonce);
    fflush(stdout);
    for (long step = 1; step <= steps; step++) {
        char byte[2];
        long at = step * 7919 % (HELD - 1);
        int good = pread(held, byte, 2, at) == 2 && byte[0] == 'h' && byte[1] == 'h';
        good = good && pread(held, byte, 1, HELD) == 0 && map[at % KEPT] == 'k';
        good = good && pread(log, byte, 2, LOG - 1) == 1 && byte[0] == 'l';
        if (good) printf("%016lx %ld\n", nonce, step);
        else printf("wrong\n");
        fflush(stdout);
        usleep(2000);
    }
    return 7;
}
