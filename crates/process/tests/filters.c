// Two threads that filter their system calls, and say again and again what becomes of some:
//   together    all have the same filters, and get one more at once later on
//   apart       the second has one more than the first
//   as_nobody   as apart, of a user who may gain no rights
//   late        as together, but the filters come later on, while the second sleeps for an hour
//   no_promise  the same of one who may; root has made its filters before
// Whatever is not listed ends the process, also the call by which a sleep goes on after a stop.
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LOAD BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define ON(call, action) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##call, 0, 1), BPF_STMT(BPF_RET | BPF_K, action)
#define FAILS(number) (SECCOMP_RET_ERRNO | (number))
#define ELSE(action) BPF_STMT(BPF_RET | BPF_K, action)

static int add(struct sock_filter *filter, size_t bytes, unsigned flags) {
    struct sock_fprog program = {bytes / sizeof *filter, filter};
    return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, flags, &program) != 0;
}

static int list(unsigned flags) {
    struct sock_filter filter[] = {
        LOAD,
        ON(write, SECCOMP_RET_ALLOW),
        ON(clock_nanosleep, SECCOMP_RET_ALLOW),
        ON(exit_group, SECCOMP_RET_ALLOW),
        ON(seccomp, SECCOMP_RET_ALLOW),
        ON(getuid, SECCOMP_RET_ALLOW),
        ON(geteuid, SECCOMP_RET_ALLOW),
        ON(getppid, FAILS(77)),
        ELSE(SECCOMP_RET_KILL_PROCESS),
    };
    return add(filter, sizeof filter, flags);
}

static int more(long call, unsigned number, unsigned flags) {
    struct sock_filter filter[] = {LOAD, ON(getuid, FAILS(number)), ELSE(SECCOMP_RET_ALLOW)};
    filter[1].k = call;
    return add(filter, sizeof filter, flags);
}

// The error of a call; 0 for none.
static int of(long call) {
    errno = 0;
    syscall(call);
    return errno;
}

static void rest(void) {
    struct timespec while_ = {0, 3000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, 0, &while_, 0)) { }
}

static int hour;
static atomic_int started, begin, ready, getuid_of_second, geteuid_of_second, wrong;

static void *second(void *apart) {
    // The C library is done with what it calls at a thread's start.
    started = 1;
    if (hour) {
        struct timespec while_ = {3600, 0};
        while (clock_nanosleep(CLOCK_MONOTONIC, 0, &while_, 0)) { }
    }
    while (!begin) rest();
    if (apart && more(SYS_getuid, 78, SECCOMP_FILTER_FLAG_LOG)) wrong = 1;
    ready = 1;
    for (;;) {
        getuid_of_second = of(SYS_getuid);
        geteuid_of_second = of(SYS_geteuid);
        rest();
    }
    return apart;
}

static int become_nobody(void) {
    // Through the kernel: glibc would ask the other thread, too.
    return syscall(SYS_setresgid, 65534, 65534, 65534) || syscall(SYS_setresuid, 65534, 65534, 65534);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "together";
    int apart = strcmp(what, "together") != 0, is_nobody = strcmp(what, "as_nobody") == 0;
    int no_promise = strcmp(what, "no_promise") == 0;
    hour = strcmp(what, "late") == 0;
    apart = apart && !hour;
    if (!no_promise && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 1;
    if (is_nobody && become_nobody()) return 1;
    pthread_t other;
    if (pthread_create(&other, 0, second, apart ? &other : 0)) return 1;
    while (!started) rest();
    if (no_promise) {
        struct sock_filter all[] = {ELSE(SECCOMP_RET_ALLOW)};
        if (add(all, sizeof all, SECCOMP_FILTER_FLAG_TSYNC) || become_nobody()) return 1;
    } else if (!hour && list(SECCOMP_FILTER_FLAG_TSYNC)) return 1;
    begin = 1;
    while (!ready && !hour) rest();
    rest();
    for (int left = 300; left > 0; left--) {
        if (hour && left == 250 && list(SECCOMP_FILTER_FLAG_TSYNC)) return 3;
        // Nobody who came by rights of his own may be left out.
        if (!apart && !hour && left == 20 && more(SYS_geteuid, 79, SECCOMP_FILTER_FLAG_TSYNC)) return 2;
        if (!apart && !hour && left < 20) rest(), rest();
        char line[80];
        int length = snprintf(line, sizeof line, "%d %d %d %d %d\n", of(SYS_getppid), of(SYS_getuid),
                              getuid_of_second, geteuid_of_second, wrong);
        if (write(1, line, length) != length) _exit(1);
        rest();
    }
    _exit(7);
}
