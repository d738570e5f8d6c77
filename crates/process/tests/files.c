// Writes files in the folder that it is given and holds them in four ways; then counts steps, and
// checks in each that they are what it has written.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { HELD = 3 << 20, KEPT = 1 << 20 };

static int fail(const char *what) {
    printf("wrong: %s\n", what);
    fflush(stdout);
    return 4;
}

static int make(const char *name, char byte, size_t size) {
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC, 0640);
    char *bytes = malloc(size);
    memset(bytes, byte, size);
    if (fd < 0 || write(fd, bytes, size) != (ssize_t)size) exit(fail(name));
    free(bytes);
    return fd;
}

int main(int argc, char **argv) {
    if (argc < 3 || chdir(argv[1])) return 2;
    int steps = atoi(argv[2]);
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    int held = make("held", 'h', HELD), kept = make("kept", 'k', KEPT);
    int log = make("log", 'l', 100), gone = make("gone", 'g', 1000);
    char *map = mmap(0, KEPT, PROT_READ | PROT_WRITE, MAP_SHARED, kept, 0);
    close(kept);
    unlink("gone");
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "socket"};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listener, (void *)&address, sizeof address) || listen(listener, 1)) return 3;
    for (int step = 1; step <= steps; step++) {
        char byte = 0;
        off_t at = (off_t)step * 7919 % HELD;
        if (pread(held, &byte, 1, at) != 1 || byte != 'h') return fail("held");
        if (pread(held, &byte, 1, HELD) != 0) return fail("held is longer");
        if (map[at % KEPT] != 'k') return fail("kept");
        if (pread(log, &byte, 1, 99) != 1 || byte != 'l') return fail("log");
        if (pread(gone, &byte, 1, 999) != 1 || byte != 'g') return fail("gone");
        printf("%016lx %d\n", nonce, step);
        fflush(stdout);
        struct timespec moment = {0, 2000000};
        nanosleep(&moment, 0);
    }
    return 7;
}
