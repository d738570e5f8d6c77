// As step.c, but each step is done by another one of 64 threads, which wait for their turns in as
// many ways as there are: a condition variable, a futex, polling. Each checks that it is still
// itself.
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { COUNT = 64 };
static int steps;
static uint64_t nonce, value;
static double sum;
static int turn = 1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread long own[2];

static void check(int good, int code) {
    if (good) return;
    char text[64];
    (void)!write(1, text, snprintf(text, sizeof text, "wrong %d %d\n", code, errno));
    _exit(code);
}

static int now(void) { return __atomic_load_n(&turn, __ATOMIC_ACQUIRE); }

static void wait_for(int step, int kind) {
    if (kind == 0) {
        pthread_mutex_lock(&lock);
        while (now() < step) pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
    }
    for (int seen; kind == 1 && (seen = now()) < step;) {
        long result = syscall(SYS_futex, &turn, FUTEX_WAIT_PRIVATE, seen, 0, 0, 0);
        check(result == 0 || errno == EAGAIN, 20);
    }
    while (kind == 2 && now() < step) check(poll(0, 0, 3) == 0, 21);
    struct timespec moment = {0, 3000000};
    while (kind == 3 && now() < step) check(nanosleep(&moment, 0) == 0, 22);
}

static void *worker(void *argument) {
    long which = (long)argument;
    char stack[8192], name[16];
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack}, found;
    check(!sigaltstack(&alternate, 0), 30);
    snprintf(name, sizeof name, "worker-%ld", which);
    check(!prctl(PR_SET_NAME, name), 31);
    sigset_t mask, current;
    sigemptyset(&mask);
    sigaddset(&mask, SIGRTMIN + which % 8);
    check(!pthread_sigmask(SIG_BLOCK, &mask, 0), 32);
    own[0] = syscall(SYS_gettid), own[1] = which;
    for (int step = 1 + which; step <= steps; step += COUNT) {
        wait_for(step, which % 4);
        char seen[16];
        check(own[0] == syscall(SYS_gettid) && own[1] == which, 33);
        check(!sigaltstack(0, &found) && found.ss_sp == stack && found.ss_size == sizeof stack, 34);
        check(!prctl(PR_GET_NAME, seen) && !strcmp(seen, name), 35);
        check(!pthread_sigmask(SIG_BLOCK, 0, &current) && sigismember(&current, SIGRTMIN + which % 8), 36);
        check(!sigismember(&current, SIGUSR2), 37);
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        check(write(1, line, length) == length, 38);
        usleep(1000);
        pthread_mutex_lock(&lock);
        __atomic_store_n(&turn, step + 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        syscall(SYS_futex, &turn, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
    }
    return (void *)which;
}

static volatile sig_atomic_t handled;
static volatile sig_atomic_t ticks;
static void tick(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    if (info->si_code == SI_TIMER && info->si_value.sival_int == 77) ticks++;
}

// Two timers after one that was deleted, so that their ids are not the first: one ticks, one waits
// for long.
static timer_t ticking, waiting;
static void start_timers(void) {
    struct sigaction action = {.sa_sigaction = tick, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMAX, .sigev_value.sival_int = 77};
    struct itimerspec often = {{0, 20000000}, {0, 20000000}}, late = {{0, 0}, {1000, 0}};
    timer_t first;
    check(!sigaction(SIGRTMAX, &action, 0) && !timer_create(CLOCK_MONOTONIC, &event, &first), 60);
    check(!timer_create(CLOCK_MONOTONIC, &event, &ticking) && !timer_create(CLOCK_REALTIME, &event, &waiting), 61);
    check(!timer_delete(first), 62);
    check(!timer_settime(ticking, 0, &often, 0) && !timer_settime(waiting, 0, &late, 0), 63);
}

static void check_timers(void) {
    struct itimerspec left;
    check(!timer_gettime(waiting, &left) && left.it_value.tv_sec > 800 && left.it_interval.tv_sec == 0, 64);
    check(!timer_gettime(ticking, &left) && left.it_interval.tv_nsec == 20000000, 65);
    int before = ticks;
    while (ticks < before + 3) pause();
    check(!timer_delete(ticking) && !timer_delete(waiting), 66);
}

static void handler(int signal) { (void)signal, handled++; }

int main(int argc, char **argv) {
    steps = argc > 1 ? atoi(argv[1]) : 100;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    check(!sigaction(SIGUSR1, &action, 0) && signal(SIGUSR2, SIG_IGN) != SIG_ERR, 40);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR1);
    check(!pthread_sigmask(SIG_BLOCK, &mask, 0), 41);
    // Two pending signals that stay so across everything: the process's, and the thread's own.
    check(!kill(getpid(), SIGUSR1), 42);
    // Its ticks go to this thread, which waits for the others by calls that go on after a signal.
    start_timers();
    sigset_t tickmask;
    sigemptyset(&tickmask), sigaddset(&tickmask, SIGRTMAX);
    check(!pthread_sigmask(SIG_BLOCK, &tickmask, 0), 67);
    pthread_t threads[COUNT];
    pid_t pid = getpid();
    for (long i = 0; i < COUNT; i++) check(!pthread_create(&threads[i], 0, worker, (void *)i), 43);
    for (long i = 0; i < COUNT; i++) {
        void *result;
        check(!pthread_join(threads[i], &result) && (long)result == i, 44);
    }
    check(pid == getpid() && !handled, 45);
    check(!pthread_sigmask(SIG_UNBLOCK, &tickmask, 0), 68);
    check_timers();
    check(!sigpending(&mask) && sigismember(&mask, SIGUSR1), 46);
    sigemptyset(&mask);
    check(!pthread_sigmask(SIG_SETMASK, &mask, 0) && handled == 1, 47);
    check(!sigaction(SIGUSR2, 0, &action) && action.sa_handler == SIG_IGN, 48);
    return 7;
}
