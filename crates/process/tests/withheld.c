// Blocks SIGTERM and SIGUSR1 as its parent might, and tells with each step which of them wait: for
// the process, and for its first thread.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    sigset_t both, pending;
    sigemptyset(&both);
    sigaddset(&both, SIGTERM);
    sigaddset(&both, SIGUSR1);
    if (sigprocmask(SIG_BLOCK, &both, 0)) return 2;
    if (argc > 2) {
        kill(getpid(), SIGTERM);
        kill(getpid(), SIGUSR1);
        syscall(SYS_tgkill, getpid(), getpid(), SIGTERM);
    }
    for (int step = 1; step <= steps; step++) {
        if (sigpending(&pending)) return 3;
        char line[64];
        int term = sigismember(&pending, SIGTERM), user = sigismember(&pending, SIGUSR1);
        int length = snprintf(line, sizeof line, "step %d %d %d\n", step, term, user);
        if (write(1, line, length) != length) return 4;
        nanosleep(&(struct timespec){0, 2000000}, 0);
    }
    return 7;
}
