// Holds one thing that kedge cannot save, and says so; then goes on saying that it is there.
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <mqueue.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static int is(const char *name, const char *wanted) { return strcmp(name, wanted) == 0; }

static void speak(void) {
    for (;;) {
        if (write(1, "there\n", 6) != 6) _exit(1);
        usleep(2000);
    }
}

static int first_has_ended(void) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", getpid(), getpid());
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, sizeof text, file)) _exit(1);
    fclose(file);
    return strrchr(text, ')')[2] == 'Z';
}

// Has a child that is to die with it, and outlives the first thread.
static void *outlive(void *unused) {
    int ready[2];
    char byte;
    if (pipe(ready)) _exit(1);
    if (fork() == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) || write(ready[1], "", 1) != 1) _exit(1);
        for (;;) pause();
    }
    if (read(ready[0], &byte, 1) != 1) _exit(1);
    while (!first_has_ended()) usleep(1000);
    speak();
    return unused;
}

static atomic_int filtered;

// May sleep, and nothing else: any other call ends the whole process.
static void *sleep_filtered(void *unused) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_nanosleep, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_restart_syscall, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    struct timespec while_ = {0, 1000000};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(1);
    filtered = 1;
    for (;;) clock_nanosleep(CLOCK_MONOTONIC, 0, &while_, 0);
    return unused;
}

static int hold(const char *what) {
    if (is(what, "seccomp")) {
        struct sock_filter allow = {BPF_RET | BPF_K, 0, 0, SECCOMP_RET_ALLOW};
        struct sock_fprog program = {1, &allow};
        return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    }
    if (is(what, "seccomp_of_another")) {
        pthread_t other;
        if (pthread_create(&other, 0, sleep_filtered, 0)) return 1;
        while (!filtered) usleep(1000);
        return 0;
    }
    if (is(what, "namespace")) return unshare(CLONE_NEWUSER | CLONE_NEWNET);
    if (is(what, "io_uring")) {
        char parameters[120] = {0};
        return syscall(SYS_io_uring_setup, 4, parameters) < 0;
    }
    if (is(what, "aio")) {
        unsigned long context = 0;
        return syscall(SYS_io_setup, 4, &context);
    }
    if (is(what, "userfaultfd")) return syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY) < 0;
    if (is(what, "netlink")) return socket(AF_NETLINK, SOCK_RAW, 0) < 0;
    if (is(what, "notification")) {
        mqd_t queue = mq_open("/kedge-test-notification", O_CREAT | O_RDWR, 0600, 0);
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
        return queue < 0 || mq_unlink("/kedge-test-notification") || mq_notify(queue, &event);
    }
    if (is(what, "huge")) {
        int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE;
        return mmap(0, 2 << 20, PROT_READ, flags, -1, 0) == MAP_FAILED;
    }
    if (is(what, "guard")) {
        char *shared = mmap(0, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        return shared == MAP_FAILED || madvise(shared + 4096, 4096, 102);
    }
    if (is(what, "deadly")) {
        pthread_t other;
        if (pthread_create(&other, 0, outlive, 0)) return 1;
        pthread_exit(0);
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc < 2 || hold(argv[1])) {
        printf("not here: %s\n", strerror(errno));
        return 0;
    }
    speak();
}
