// Has securebits and says which, with the capabilities that it has, again and again; with another
// argument, it gives CAP_SETPCAP up before.
#include <linux/securebits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc < 2 || prctl(PR_SET_SECUREBITS, strtoul(argv[1], 0, 0))) return 1;
    if (argc > 2) {
        // Without CAP_SETPCAP from here on.
        unsigned int head[2] = {0x20080522, 0}, sets[6];
        if (syscall(SYS_capget, head, sets)) return 1;
        sets[0] &= ~(1u << 8), sets[1] &= ~(1u << 8);
        if (syscall(SYS_capset, head, sets)) return 1;
    }
    for (int left = 200; left > 0; left--) {
        unsigned int head[2] = {0x20080522, 0}, sets[6];
        if (syscall(SYS_capget, head, sets)) return 1;
        printf("%#x %#x %#x\n", prctl(PR_GET_SECUREBITS), sets[0], sets[1]);
        if (fflush(stdout)) return 1;
        usleep(2000);
    }
    return 7;
}
