// Takes process ids: a child for each that nobody has, which waits until this program's standard
// input ends. Prints "taken" when all of them are somebody's. Usage: taken PID...
#include <errno.h>
#include <linux/sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    pid_t parent = getpid();
    for (int i = 1; i < argc; i++) {
        pid_t wanted = atoi(argv[i]);
        struct clone_args args = {.exit_signal = SIGCHLD, .set_tid = (uintptr_t)&wanted, .set_tid_size = 1};
        long child = syscall(SYS_clone3, &args, sizeof args);
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (getppid() != parent) return 1;
            for (;;) pause();
        }
        if (child < 0 && errno != EEXIST) {
            perror("clone3");
            return 1;
        }
    }
    puts("taken");
    fflush(stdout);
    return getchar() == EOF ? 0 : 1;
}
