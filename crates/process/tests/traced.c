// A parent that traces its child, as a debugger does, and both go on: a line each time the child
// lives.
#include <stdio.h>
#include <sys/ptrace.h>
#include <unistd.h>

int main(void) {
    pid_t child = fork();
    if (!child) for (;;) {
        if (write(1, "lives\n", 6) != 6) return 1;
        usleep(5000);
    }
    if (ptrace(PTRACE_SEIZE, child, 0, PTRACE_O_EXITKILL)) return 2;
    for (;;) pause();
}
