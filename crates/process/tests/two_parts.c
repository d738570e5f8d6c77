/* A child that shares memory with its parent, and each tells steps until the parent's end. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

int main(void)
{
    volatile int *word = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (word == MAP_FAILED) return 1;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (;;) {
            word[0]++;
            usleep(1000);
        }
    }
    printf("child %d\n", child);
    for (int step = 1;; step++) {
        printf("step %d %d\n", step, word[0]);
        fflush(stdout);
        usleep(1000);
    }
}
