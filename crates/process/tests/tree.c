// As step.c, but each step is done by another process of a tree, by turns, through memory that they
// share. Each checks its ids, its parent's, group's and session's, and what it has of its own.
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 9 };
struct shared {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int turn, ready;
    uint64_t nonce, value;
    double sum;
};
static struct shared *shared;
static int steps;

static void check(int good, int code) {
    if (good) return;
    char text[64];
    (void)!write(1, text, snprintf(text, sizeof text, "wrong %d %d\n", code, errno));
    _exit(code);
}

struct ids { pid_t pid, parent, group, session; };
static struct ids outer;
static pid_t orphans_parent;

// Ids from outside of the job are others after a restart: 0 stands for them.
static struct ids ids(void) {
    struct ids ids = {getpid(), getppid(), getpgid(0), getsid(0)};
    if (ids.group == outer.group) ids.group = 0;
    if (ids.session == outer.session) ids.session = 0;
    return ids;
}

static int same(struct ids a, struct ids b, int inner) {
    return a.pid == b.pid && (!inner || ((a.parent == b.parent || a.parent == outer.parent) && a.group == b.group && a.session == b.session));
}

static void play(int which, int inner) {
    struct ids start = ids();
    uint64_t *secret = malloc(4096);
    *secret = shared->nonce ^ which;
    pthread_mutex_lock(&shared->lock);
    shared->ready++;
    pthread_cond_broadcast(&shared->changed);
    while (shared->ready < COUNT) pthread_cond_wait(&shared->changed, &shared->lock);
    for (int step = 1 + which; step <= steps; step += COUNT) {
        while (shared->turn < step) pthread_cond_wait(&shared->changed, &shared->lock);
        check(*secret == (shared->nonce ^ which), 20);
        check(same(start, ids(), inner), 21 + which);
        shared->sum += 1.0 / step;
        shared->value = shared->value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", shared->nonce, step, shared->sum, shared->value);
        check(write(1, line, length) == length, 30);
        usleep(2000);
        shared->turn = step + 1;
        pthread_cond_broadcast(&shared->changed);
    }
    pthread_mutex_unlock(&shared->lock);
}

static pid_t child(int which, void (*before)(void)) {
    pid_t pid = fork();
    check(pid >= 0, 40);
    if (pid) return pid;
    before();
    play(which, 1);
    while (wait(0) > 0) continue;
    _exit(which);
}

static void nothing(void) {}
static void own_group(void) { check(!setpgid(0, 0), 41); }
static void own_session(void) { check(setsid() == getpid(), 42); }

// A child of a process that ends at once, and so an orphan: it stays in its session and group.
static void orphan(int which, void (*before)(void)) {
    pid_t between = fork();
    if (!between) {
        before();
        pid_t pid = fork();
        if (pid) _exit(0);
        while (getppid() != orphans_parent) usleep(1000);
        play(which, 1);
        _exit(0);
    }
    check(waitpid(between, 0, 0) == between, 44);
}
static void grandchild(void) {
    own_session();
    // In the session of one that goes on.
    orphan(7, nothing);
    child(3, own_group);
}

int main(int argc, char **argv) {
    steps = argc > 1 ? atoi(argv[1]) : 100;
    outer = ids();
    // More than it touches: what nobody wrote costs nothing.
    shared = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(shared != MAP_FAILED, 50);
    pthread_mutexattr_t lock;
    pthread_condattr_t changed;
    pthread_mutexattr_init(&lock), pthread_mutexattr_setpshared(&lock, PTHREAD_PROCESS_SHARED);
    pthread_condattr_init(&changed), pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->lock, &lock), pthread_cond_init(&shared->changed, &changed);
    shared->turn = 1;
    getrandom(&shared->nonce, sizeof shared->nonce, 0);
    shared->value = shared->nonce;
    // Ended and not waited for until the end: by a status, and by a signal.
    pid_t first = fork();
    if (!first) _exit(42);
    pid_t second = fork();
    if (!second) kill(getpid(), SIGTERM), pause();
    siginfo_t info;
    check(!waitid(P_PID, first, &info, WEXITED | WNOWAIT), 51);
    check(!waitid(P_PID, second, &info, WEXITED | WNOWAIT), 52);
    orphans_parent = outer.parent;
    // In the session, or the group, of one that has ended.
    orphan(6, own_session), orphan(8, own_group);
    child(1, own_group), child(2, grandchild), child(4, nothing), child(5, own_session);
    play(0, 0);
    int status, ended = 0, all = 0;
    check(waitpid(first, &status, 0) == first && WIFEXITED(status) && WEXITSTATUS(status) == 42, 53);
    check(waitpid(second, &status, 0) == second && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM, 54);
    while (wait(&status) > 0) ended++, all += WEXITSTATUS(status);
    check(ended == 4 && all == 1 + 2 + 4 + 5, 55);
    return 7;
}
