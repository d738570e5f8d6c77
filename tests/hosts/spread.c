/* A job with all kinds of things that have names in one folder: `spread STEPS MS FOLDER`. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static char path[4096];

static const char *in(const char *folder, const char *name) {
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    const char *folder = argv[3];
    uint32_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 3;
    int data = open(in(folder, "data"), O_RDWR | O_CREAT, 0644);
    if (data < 0 || write(data, "the job's", 9) != 9) return 4;
    int shown = open(in(folder, "shown"), O_RDWR | O_CREAT, 0644);
    if (shown < 0 || ftruncate(shown, 4096) < 0) return 5;
    if (mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, shown, 0) == MAP_FAILED) return 5;
    close(shown);
    int ghost = open(in(folder, "ghost"), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (ghost < 0 || write(ghost, "ghost", 5) != 5 || unlink(path) < 0) return 6;
    if (mkdir(in(folder, "gone"), 0700) < 0 || open(path, O_RDONLY | O_DIRECTORY) < 0 || rmdir(path) < 0) return 7;
    if (mkfifo(in(folder, "fifo"), 0600) < 0 || open(path, O_RDWR | O_NONBLOCK) < 0) return 8;
    int watch = inotify_init1(0);
    if (watch < 0 || inotify_add_watch(watch, folder, IN_CREATE) < 0) return 9;
    printf("nonce %08x\n", nonce);
    fflush(stdout);
    int steps = atoi(argv[1]), pause = atoi(argv[2]);
    for (int step = 1; step <= steps; step++) {
        usleep(pause * 1000);
        printf("%08x %d\n", nonce, step);
        fflush(stdout);
    }
    printf("%08x well\n", nonce);
    return 7;
}
