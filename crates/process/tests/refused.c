// Holds one thing that kedge cannot save, and says so; then goes on saying that it is there.
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/rtnetlink.h>
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
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/fanotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
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

// May sleep, and nothing else: any other call ends the whole process, also the one by which a sleep
// goes on after a stop.
static void *sleep_filtered(void *unused) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clock_nanosleep, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    struct timespec while_ = {0, 20000000};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(1);
    filtered = 1;
    for (;;) clock_nanosleep(CLOCK_MONOTONIC, 0, &while_, 0);
    return unused;
}

// Maps a file of huge pages that nobody has open any more and that no name leads to, of a file
// system that is mounted no more. It takes none of the pages that are set aside.
static int map_nameless_huge_file(void) {
    char folder[] = "/tmp/kedge-test-huge-XXXXXX", path[64];
    if (!mkdtemp(folder)) return 1;
    if (mount("none", folder, "hugetlbfs", 0, "pagesize=2M")) {
        int error = errno;
        rmdir(folder);
        errno = error;
        return 1;
    }
    snprintf(path, sizeof path, "%s/pages", folder);
    int fd = open(path, O_CREAT | O_RDWR, 0600), flags = MAP_PRIVATE | MAP_NORESERVE;
    void *pages = mmap(0, 2 << 20, PROT_READ | PROT_WRITE, flags, fd, 0);
    int error = errno;
    close(fd);
    unlink(path);
    umount2(folder, MNT_DETACH);
    rmdir(folder);
    errno = error;
    return pages == MAP_FAILED;
}

static void ignore(union sigval unused) { (void)unused; }

static void read_value(int signal, siginfo_t *info, void *unused) {
    (void)signal, (void)info, (void)unused;
}

// Submits one request to a ring of its own.
static int submit(int ring, const struct io_uring_params *p, struct io_uring_sqe request) {
    int both = PROT_READ | PROT_WRITE;
    char *queues = mmap(0, 4096, both, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *requests = mmap(0, 4096, both, MAP_SHARED, ring, IORING_OFF_SQES);
    if (queues == MAP_FAILED || requests == MAP_FAILED) return 1;
    requests[0] = request;
    *(_Atomic unsigned *)(queues + p->sq_off.tail) = 1;
    return syscall(SYS_io_uring_enter, ring, 1, 0, 0, 0, 0) != 1;
}

// A poll that has told of two bytes, and the end of it, is one request with three completions: two
// that wait seem to be none.
static int hold_more_completions(int ring, const struct io_uring_params *p, int ends[2]) {
    static struct __kernel_timespec hour = {3600, 0};
    int both = PROT_READ | PROT_WRITE;
    char *queues = mmap(0, 4096, both, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *requests = mmap(0, 4096, both, MAP_SHARED, ring, IORING_OFF_SQES);
    if (queues == MAP_FAILED || requests == MAP_FAILED) return 1;
    struct io_uring_sqe wait = {.opcode = IORING_OP_TIMEOUT, .addr = (unsigned long)&hour, .len = 1};
    requests[0] = (struct io_uring_sqe){
        .opcode = IORING_OP_POLL_ADD, .fd = ends[0], .poll32_events = 1, .len = IORING_POLL_ADD_MULTI, .user_data = 7};
    requests[1] = (struct io_uring_sqe){.opcode = IORING_OP_POLL_REMOVE, .addr = 7};
    requests[2] = requests[3] = wait;
    _Atomic unsigned *tail = (void *)(queues + p->sq_off.tail);
    unsigned *array = (void *)(queues + p->sq_off.array);
    for (unsigned i = 0; i < 4; i++) array[i] = i;
    for (unsigned i = 0; i < 4; i++) {
        *tail = i + 1;
        if (syscall(SYS_io_uring_enter, ring, 1, 0, 0, 0, 0) != 1) return 1;
        for (unsigned byte = 1; i == 0 && byte <= 2; byte++) {
            if (write(ends[1], "!", 1) != 1) return 1;
            if (syscall(SYS_io_uring_enter, ring, 0, byte, IORING_ENTER_GETEVENTS, 0, 0)) return 1;
        }
    }
    return 0;
}

static int hold_ring(const char *what) {
    struct io_uring_params p = {0};
    struct __kernel_timespec hour = {3600, 0};
    static char page[4096] __attribute__((aligned(4096)));
    int ends[2], entries = 4;
    if (is(what, "with_a_thread")) p.flags = IORING_SETUP_SQPOLL;
    if (is(what, "of_one_thread")) p.flags = IORING_SETUP_SINGLE_ISSUER;
    if (is(what, "that_is_polled")) p.flags = IORING_SETUP_IOPOLL;
    if (is(what, "that_is_disabled")) p.flags = IORING_SETUP_R_DISABLED;
    if (is(what, "of_large_requests")) p.flags = IORING_SETUP_SQE128;
    if (is(what, "of_large_completions")) p.flags = IORING_SETUP_CQE32;
    if (strncmp(what, "of_large", 8) == 0) entries = 256;
    int ring = syscall(SYS_io_uring_setup, entries, &p);
    if (ring < 0 || pipe(ends)) return 1;
    if (is(what, "that_waits")) {
        struct io_uring_sqe request = {.opcode = IORING_OP_POLL_ADD, .fd = ends[0], .poll32_events = 1};
        return submit(ring, &p, request);
    }
    if (is(what, "with_a_timeout")) {
        struct io_uring_sqe request = {.opcode = IORING_OP_TIMEOUT, .addr = (unsigned long)&hour, .len = 1};
        return submit(ring, &p, request);
    }
    if (is(what, "that_had_more_completions")) return hold_more_completions(ring, &p, ends);
    if (is(what, "with_files")) return syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, ends, 2);
    if (is(what, "with_buffers")) {
        struct iovec buffer = {page, sizeof page};
        return syscall(SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1);
    }
    if (is(what, "with_a_group")) {
        struct io_uring_buf_reg group = {.ring_addr = (unsigned long)page, .ring_entries = 8, .bgid = 7};
        return syscall(SYS_io_uring_register, ring, IORING_REGISTER_PBUF_RING, &group, 1);
    }
    if (is(what, "with_an_eventfd")) {
        int event = eventfd(0, 0);
        return syscall(SYS_io_uring_register, ring, IORING_REGISTER_EVENTFD, &event, 1);
    }
    if (is(what, "with_credentials")) {
        int credentials = syscall(SYS_io_uring_register, ring, IORING_REGISTER_PERSONALITY, 0, 0);
        struct io_uring_sqe request = {.opcode = IORING_OP_NOP, .personality = credentials};
        return credentials < 0 || submit(ring, &p, request);
    }
    if (is(what, "in_a_list")) {
        struct io_uring_rsrc_update update = {.offset = -1U, .data = ring};
        void *queues = mmap(0, 4096, PROT_READ, MAP_SHARED, ring, IORING_OFF_SQ_RING);
        return queues == MAP_FAILED || syscall(SYS_io_uring_register, ring, IORING_REGISTER_RING_FDS, &update, 1) != 1;
    }
    return 0;
}

// May read and write, and nothing else.
static void *read_strictly(void *from) {
    char byte;
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) _exit(1);
    filtered = 1;
    while (read(*(int *)from, &byte, 1) == 1) { }
    return 0;
}

// Becomes such a thread at a signal.
static void *read_strictly_when_told(void *from) {
    int signal;
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigwait(&set, &signal);
    return read_strictly(from);
}

// Of the next message in a queue.
static int be_told(const char *how) {
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    mqd_t queue = mq_open("/kedge-test-notification", O_CREAT | O_RDWR, 0600, 0);
    if (queue < 0 || mq_unlink("/kedge-test-notification")) return 1;
    if (is(how, "_with_a_value")) {
        struct sigaction action = {.sa_sigaction = read_value, .sa_flags = SA_SIGINFO};
        if (sigaction(SIGUSR1, &action, 0)) return 1;
    } else if (is(how, "_that_is_waited_for")) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        if (sigprocmask(SIG_BLOCK, &set, 0)) return 1;
    } else if (is(how, "_beside_a_message")) {
        event.sigev_notify = SIGEV_NONE;
        if (mq_send(queue, "", 0, 0)) return 1;
    } else if (is(how, "_without_a_socket")) {
        event.sigev_notify = SIGEV_THREAD;
        event.sigev_notify_function = ignore;
        // The next one is glibc's.
        int next = dup(0);
        if (next < 0 || close(next) || mq_notify(queue, &event)) return 1;
        return close(next);
    } else {
        return 1;
    }
    return mq_notify(queue, &event);
}

// Has an epoll watch a pipe that only a process outside of the job holds: its parent has ended.
static int watch_what_nobody_holds(void) {
    int ends[2], ready[2], epoll = epoll_create1(0);
    char byte;
    if (epoll < 0 || pipe(ends) || pipe(ready)) return 1;
    struct epoll_event event = {.events = EPOLLIN};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, ends[0], &event)) return 1;
    int child = fork();
    if (child == 0) {
        if (fork()) _exit(0);
        // It ends with the program, whose end of the pipe is the other one.
        close(1), close(ends[1]), close(ready[0]);
        if (write(ready[1], "", 1) != 1) _exit(1);
        close(ready[1]);
        _exit(read(ends[0], &byte, 1));
    }
    if (waitpid(child, 0, 0) != child || read(ready[0], &byte, 1) != 1) return 1;
    return close(ends[0]);
}

// A socket whose filter is an eBPF program: that no packet is for it.
static int filter_by_a_program(void) {
    struct bpf_insn program[] = {
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 0},
        {.code = BPF_JMP | BPF_EXIT},
    };
    union bpf_attr load = {
        .prog_type = BPF_PROG_TYPE_SOCKET_FILTER, .insn_cnt = 2, .insns = (unsigned long)program,
        .license = (unsigned long)"GPL",
    };
    int loaded = syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof load), fd = socket(AF_UNIX, SOCK_DGRAM, 0);
    if (loaded < 0 || fd < 0) return 1;
    return setsockopt(fd, SOL_SOCKET, SO_ATTACH_BPF, &loaded, sizeof loaded) || close(loaded);
}

// Unmaps the kernel's code, which only calls for the time need.
static int forget_vdso(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    unsigned long start, end;
    char line[512];
    while (maps && fgets(line, sizeof line, maps)) {
        if (strstr(line, "[vdso]") && sscanf(line, "%lx-%lx", &start, &end) == 2) {
            fclose(maps);
            return munmap((void *)start, end - start);
        }
    }
    return 1;
}

// A process whose memory is its parent's as well, until that ends.
static int wait_for_the_parent(void *unused) {
    (void)unused;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
}

static int hold(const char *what) {
    if (is(what, "nothing")) return 0;
    if (is(what, "member_that_nobody_holds")) return watch_what_nobody_holds();
    if (is(what, "socket_with_a_program")) return filter_by_a_program();
    if (is(what, "no_vdso")) return forget_vdso();
    if (is(what, "one_memory")) {
        static char stack[64 << 10] __attribute__((aligned(16)));
        return clone(wait_for_the_parent, stack + sizeof stack, CLONE_VM | SIGCHLD, 0) < 0;
    }
    if (is(what, "seccomp_strict_later")) {
        static int ends[2];
        sigset_t set;
        pthread_t other;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, 0);
        return pipe(ends) || pthread_create(&other, 0, read_strictly_when_told, ends);
    }
    if (is(what, "seccomp_strict")) {
        static int ends[2];
        pthread_t other;
        if (pipe(ends) || pthread_create(&other, 0, read_strictly, ends)) return 1;
        while (!filtered) usleep(1000);
        return 0;
    }
    if (is(what, "seccomp_notify")) {
        struct sock_filter filter[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_swapon, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
        return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
    }
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
    if (is(what, "login")) {
        // Whoever has none yet may choose.
        int fd = open("/proc/self/loginuid", O_WRONLY | O_CLOEXEC);
        return fd < 0 || write(fd, "3", 1) != 1 || close(fd);
    }
    if (is(what, "namespace")) return unshare(CLONE_NEWUSER | CLONE_NEWNET);
    if (strncmp(what, "ring_", 5) == 0) return hold_ring(what + 5);
    if (is(what, "aio_of_a_parent")) {
        // The ring is mapped here as well, and the context is the parent's alone.
        unsigned long context = 0;
        if (syscall(SYS_io_setup, 4, &context)) return 1;
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;) pause();
        }
        return 0;
    }
    if (is(what, "userfaultfd")) return syscall(SYS_userfaultfd, UFFD_USER_MODE_ONLY) < 0;
    if (is(what, "netlink")) {
        // With an answer that it never reads.
        struct {
            struct nlmsghdr header;
            struct ifinfomsg link;
        } request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST, 7, 0}, {.ifi_index = 1}};
        int fd = socket(AF_NETLINK, SOCK_RAW, 0);
        return fd < 0 || send(fd, &request, sizeof request, 0) != sizeof request;
    }
    if (is(what, "huge_file")) return map_nameless_huge_file();
    if (strncmp(what, "notification", 12) == 0) return be_told(what + 12);
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
