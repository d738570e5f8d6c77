// A subreaper with a child that is one, too, and a grandchild that is none: each looks all the time
// whether it has other children than its own, until SIGTERM. With an argument, all signals that do
// nothing are caught.
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static volatile sig_atomic_t done, quiet;

static void end(int signal) { done = 1; }
static void ignore(int signal) {}
static void count(int signal) { quiet++; }

static void fail(const char *what) {
    printf("%s in %d\n", what, getpid());
    fflush(stdout);
    kill(0, SIGKILL);
}

static void look(pid_t child) {
    char path[64], text[64] = "", own[16];
    sprintf(path, "/proc/self/task/%d/children", getpid());
    FILE *children = fopen(path, "r");
    if (fgets(text, sizeof text, children) == 0) text[0] = 0;
    fclose(children);
    sprintf(own, "%d ", child);
    if (strcmp(text, child ? own : "")) fail("a stranger among the children");
    if (waitpid(-1, 0, WNOHANG) != (child ? 0 : -1)) fail("a child that is none");
}

// Its child's id; 0 in the child.
static pid_t level(int subreaper) {
    prctl(PR_SET_CHILD_SUBREAPER, subreaper);
    return fork();
}

static void stay(pid_t child, int subreaper) {
    int is = -1;
    while (!done) {
        look(child);
        usleep(500);
    }
    if (child) {
        kill(child, SIGTERM);
        int status;
        if (waitpid(-1, &status, 0) != child || status) fail("another child's end");
    }
    // The clones that hold their memory still live.
    if (waitpid(-1, 0, 0) != -1 || errno != ECHILD) fail("another child");
    if (prctl(PR_GET_CHILD_SUBREAPER, &is) || is != subreaper) fail("no subreaper any more");
}

int main(int argc, char **argv) {
    setpgid(0, 0);
    signal(SIGTERM, end);
    int others[] = {SIGURG, SIGWINCH};
    for (int i = 0; i < 2 && argc > 1; i++) signal(others[i], count);
    if (argc > 1) signal(SIGCHLD, ignore);
    pid_t child = level(1);
    if (child == 0) {
        child = level(1);
        if (child == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            puts("ready");
            fflush(stdout);
            stay(0, 0);
            return 0;
        }
        stay(child, 1);
        return 0;
    }
    stay(child, 1);
    puts(quiet ? "disturbed" : "well");
    return 0;
}
