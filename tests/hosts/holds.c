/* A job that holds a deleted set-uid file of its own and a file that it reads: `holds STEPS MS GHOST READ MADE`.
 * In each step it makes the file MADE anew, whose owner tells with whose rights the job works. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    uint32_t nonce;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 3;
    int ghost = open(argv[3], O_RDWR | O_CREAT | O_EXCL, 0700);
    if (ghost < 0 || write(ghost, "ghost", 5) != 5 || fchmod(ghost, 04755) < 0 || unlink(argv[3]) < 0) return 4;
    if (open(argv[4], O_RDONLY) < 0) return 5;
    printf("nonce %08x\n", nonce);
    fflush(stdout);
    int steps = atoi(argv[1]), pause = atoi(argv[2]);
    for (int step = 1; step <= steps; step++) {
        usleep(pause * 1000);
        unlink(argv[5]);
        int made = open(argv[5], O_WRONLY | O_CREAT | O_EXCL, 0644);
        if (made < 0) return 6;
        close(made);
        printf("%08x %d\n", nonce, step);
        fflush(stdout);
    }
    printf("%08x well\n", nonce);
    return 7;
}
