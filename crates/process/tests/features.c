// As step.c; each step looks whether one feature, which the first argument names, is still as it
// was at the start.
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <mqueue.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, FORMER = 16 };

// Says it also if several processes do.
static void wrong(int line, long found, long expected) {
    dprintf(1, "wrong: line %d, %ld (%#lx) for %ld, errno %d\n", line, found, found, expected, errno);
    _exit(1);
}
#define SAME(found, expected) do { long found_ = (found), expected_ = (expected); \
    if (found_ != expected_) wrong(__LINE__, found_, expected_); } while (0)
#define REQUIRE(what) SAME(!!(what), 1)

static long former[FORMER];
static int begun;

// Notes a value the first time, and compares it from then on.
static void keep(int line, int index, long value) {
    if (!begun) former[index] = value;
    else if (former[index] != value) wrong(line, value, former[index]);
}
#define KEEP(index, value) keep(__LINE__, index, value)

static long number_in(const char *path) {
    char text[64] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    REQUIRE(read(fd, text, sizeof text - 1) >= 0);
    close(fd);
    return strtol(text, 0, 0);
}

static void write_in(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    REQUIRE(fd >= 0 && write(fd, text, strlen(text)) == (long)strlen(text));
    close(fd);
}

static void attributes(void) {
    unsigned long nodes[16] = {1};
    int mode = 0;
    if (!begun) {
        // MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, and of cores.
        REQUIRE(syscall(SYS_membarrier, 1 << 4, 0, 0) == 0);
        syscall(SYS_membarrier, 1 << 6, 0, 0);
        write_in("/proc/self/oom_score_adj", "321");
        REQUIRE(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
        REQUIRE(prctl(PR_SET_TIMERSLACK, 12345, 0, 0, 0) == 0);
        write_in("/proc/self/coredump_filter", "0x7");
        // Idle.
        REQUIRE(syscall(SYS_ioprio_set, 1, 0, 3 << 13) == 0);
        // MPOL_INTERLEAVE; there may be no such thing.
        syscall(SYS_set_mempolicy, 3, nodes, 1024);
    }
    KEEP(0, syscall(SYS_membarrier, 1 << 3, 0, 0));
    KEEP(1, syscall(SYS_membarrier, 1 << 5, 0, 0));
    SAME(former[0], 0);
    SAME(number_in("/proc/self/oom_score_adj"), 321);
    SAME(prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0), 1);
    SAME(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0), 12345);
    SAME(number_in("/proc/self/coredump_filter"), number_in("/proc/self/coredump_filter"));
    SAME(syscall(SYS_ioprio_get, 1, 0), 3 << 13);
    memset(nodes, 0, sizeof nodes);
    syscall(SYS_get_mempolicy, &mode, nodes, 1024, 0, 0);
    KEEP(2, mode);
    KEEP(3, nodes[0]);
}

// Memory that is to lie on some nodes (mbind), beside a policy of the process's own.
static void bound(void) {
    // MPOL_PREFERRED, MPOL_BIND, and MPOL_INTERLEAVE for the process.
    enum { PREFERRED = 1, BIND = 2, INTERLEAVE = 3, RANGES = 4, PAGES = 4, F_ADDR = 2 };
    static char *ranges[RANGES];
    static int known;
    static const int modes[RANGES] = {BIND, PREFERRED, BIND, 0};
    unsigned long nodes[16] = {1};
    if (!begun) {
        known = syscall(SYS_set_mempolicy, INTERLEAVE, nodes, 1024) == 0;
        char *memory = mmap(0, 3 * PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        int file = memfd_create("bound", 0);
        REQUIRE(memory != MAP_FAILED && ftruncate(file, PAGES * PAGE) == 0);
        for (int i = 0; i < RANGES; i++) ranges[i] = memory + (i == 3 ? 2 : i) * PAGES * PAGE;
        ranges[2] = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        for (int i = 0; i < RANGES && known; i++) {
            if (modes[i]) REQUIRE(syscall(SYS_mbind, ranges[i], PAGES * PAGE, modes[i], nodes, 1024, 0) == 0);
        }
        for (int i = 0; i < RANGES; i++) memset(ranges[i], 'b' + i, PAGES * PAGE);
    }
    for (int i = 0; i < RANGES; i++) {
        SAME(ranges[i][PAGES * PAGE - 1], 'b' + i);
        // Pages that are written again, for an image that builds on another.
        ranges[i][0]++;
        if (!known) continue;
        int mode = -1;
        memset(nodes, 0, sizeof nodes);
        REQUIRE(syscall(SYS_get_mempolicy, &mode, nodes, 1024, ranges[i] + PAGE, F_ADDR) == 0);
        SAME(mode, modes[i]);
        if (mode) SAME(nodes[0], 1);
    }
    int mode = -1;
    if (known) SAME(syscall(SYS_get_mempolicy, &mode, nodes, 1024, 0, 0), 0);
    if (known) SAME(mode, INTERLEAVE);
}

// Of one that root has made another user, and that looks at itself.
static void dumpable(void) {
    if (!begun) {
        if (geteuid() == 0) REQUIRE(setgid(1234) == 0 && setuid(1234) == 0);
        REQUIRE(prctl(PR_SET_DUMPABLE, 1, 0, 0, 0) == 0);
    }
    SAME(prctl(PR_GET_DUMPABLE, 0, 0, 0, 0), 1);
    struct stat stat_;
    REQUIRE(stat("/proc/self/environ", &stat_) == 0);
    SAME(stat_.st_uid, geteuid());
    REQUIRE(open("/proc/self/maps", O_RDONLY | O_CLOEXEC) >= 0);
    close_range(5, ~0u, 0);
}

static void undumpable(void) {
    // Nobody but root can look at such a one.
    if (geteuid()) return;
    if (!begun) REQUIRE(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0);
    SAME(prctl(PR_GET_DUMPABLE, 0, 0, 0, 0), 0);
}

static int ready[2];
// Shared: the last step was done, and processes lose their parents.
static volatile int *ending;
static pid_t outer_group, outer_session;

// Stays, and sees to it that its place in the tree stays the same.
static void stay(void) {
    long group = getpgid(0), session = getsid(0), parent = getppid();
    REQUIRE(write(ready[1], "", 1) == 1);
    for (;;) {
        // What is outside of the job has no number after a restart.
        if (group != outer_group) SAME(getpgid(0), group);
        if (session != outer_session) SAME(getsid(0), session);
        if (getppid() != parent && !*ending) wrong(__LINE__, getppid(), parent);
        usleep(5000);
    }
}

static void await(int count) {
    char byte;
    for (int i = 0; i < count; i++) REQUIRE(read(ready[0], &byte, 1) == 1);
}

static void settle_orphan(pid_t reaper) {
    while (getppid() != reaper) usleep(1000);
    stay();
}

// Each leaves the session that its parent has left, and the last has stayed in the first.
static void sessions(void) {
    if (begun) return;
    if (fork() == 0) {
        if (fork() == 0) {
            if (fork() == 0) stay();
            setsid();
            stay();
        }
        setsid();
        stay();
    }
    await(3);
}

// An orphan in the session of a leader that has ended and not been waited for.
static void ended_leader(void) {
    static pid_t leader;
    if (!begun) {
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        pid_t own = getpid();
        if ((leader = fork()) == 0) {
            setsid();
            if (fork() == 0) settle_orphan(own);
            _exit(5);
        }
        await(1);
    }
    siginfo_t info = {0};
    REQUIRE(waitid(P_PID, leader, &info, WEXITED | WNOHANG | WNOWAIT) == 0);
    SAME(info.si_status, 5);
}

// Orphans of other sessions, one of which nobody leads any more, and a group whose leader has moved
// on.
static void subreaper(void) {
    if (begun) return;
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    pid_t own = getpid();
    if (fork() == 0) {
        setsid();
        if (fork() == 0) {
            if (fork() == 0) settle_orphan(own);
            _exit(0);
        }
        wait(0);
        stay();
    }
    pid_t leader = fork();
    if (leader == 0) {
        setsid();
        if (fork() == 0) settle_orphan(own);
        _exit(0);
    }
    REQUIRE(waitpid(leader, 0, 0) == leader);
    pid_t first = fork();
    if (first == 0) {
        setsid();
        pid_t second = fork();
        if (second == 0) {
            setpgid(0, 0);
            pid_t third = fork();
            if (third == 0) stay();
            REQUIRE(setpgid(0, getppid()) == 0);
            stay();
        }
        stay();
    }
    await(5);
}

// The terminal's owner and permissions, which root may have given away.
static void terminal_owner(void) {
    static int slave;
    struct stat found;
    if (!begun) {
        int master = posix_openpt(O_RDWR | O_NOCTTY);
        REQUIRE(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
        REQUIRE((slave = open(ptsname(master), O_RDWR | O_NOCTTY)) >= 0);
        REQUIRE(fchmod(slave, 0604) == 0 && (geteuid() || fchown(slave, 1234, 1235) == 0));
    }
    REQUIRE(fstat(slave, &found) == 0);
    SAME(found.st_mode & 0777, 0604);
    KEEP(0, found.st_uid);
    if (geteuid() == 0) KEEP(1, found.st_gid);
}

// Says at each step that a file which no name leads to is still the worker's, whom root has made
// another user.
static void look_at_own_file(int in, int out) {
    enum { LENGTH = 5000 };
    char name[] = "/tmp/kedge-worker-XXXXXX", bytes[LENGTH], again[LENGTH], byte;
    uid_t user = geteuid();
    gid_t group = getegid();
    if (user == 0) {
        user = 1234, group = 1235;
        REQUIRE(setgroups(0, 0) == 0 && setgid(group) == 0 && setuid(user) == 0);
    }
    int fd = mkostemp(name, O_CLOEXEC);
    memset(bytes, 'w', LENGTH);
    REQUIRE(fd >= 0 && write(fd, bytes, LENGTH) == LENGTH);
    REQUIRE(fchmod(fd, 0640) == 0 && unlink(name) == 0);
    while (read(in, &byte, 1) == 1) {
        struct stat found;
        REQUIRE(fstat(fd, &found) == 0);
        SAME(found.st_uid, user);
        SAME(found.st_gid, group);
        SAME(found.st_mode & 07777, 0640);
        SAME(found.st_nlink, 0);
        REQUIRE(pread(fd, again, LENGTH, 0) == LENGTH && memcmp(bytes, again, LENGTH) == 0);
        // As its owner it may have it once more.
        char path[32];
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
        int other = open(path, O_RDWR | O_CLOEXEC);
        REQUIRE(other >= 0 && close(other) == 0);
        REQUIRE(write(out, &byte, 1) == 1);
    }
    _exit(0);
}

static void file_of_a_worker(void) {
    static int asks[2], tells[2];
    char byte = 1;
    if (!begun) {
        REQUIRE(pipe2(asks, O_CLOEXEC) == 0 && pipe2(tells, O_CLOEXEC) == 0);
        if (fork() == 0) {
            close(asks[1]);
            close(tells[0]);
            look_at_own_file(asks[0], tells[1]);
        }
        close(asks[0]);
        close(tells[1]);
    }
    REQUIRE(write(asks[1], &byte, 1) == 1);
    REQUIRE(read(tells[0], &byte, 1) == 1);
}

// Stopped, and its parent has not been told.
static void stopped(void) {
    static pid_t child;
    if (!begun) {
        if ((child = fork()) == 0) {
            setpgid(0, 0);
            for (;;) kill(getpid(), SIGTSTP);
        }
    }
    siginfo_t info = {0};
    REQUIRE(waitid(P_PID, child, &info, WSTOPPED | WNOWAIT) == 0);
    SAME(info.si_code, CLD_STOPPED);
    SAME(info.si_status, SIGTSTP);
}

static void *with_trap(void *unused) {
    pthread_kill(pthread_self(), SIGTRAP);
    for (;;) {
        sigset_t set;
        REQUIRE(sigpending(&set) == 0 && sigismember(&set, SIGTRAP));
        usleep(5000);
    }
    return unused;
}

static void trap(void) {
    sigset_t set;
    if (!begun) {
        sigemptyset(&set);
        sigaddset(&set, SIGTRAP);
        REQUIRE(sigprocmask(SIG_BLOCK, &set, 0) == 0);
        pthread_t thread;
        REQUIRE(pthread_create(&thread, 0, with_trap, 0) == 0);
        union sigval value = {.sival_int = 42};
        REQUIRE(sigqueue(getpid(), SIGTRAP, value) == 0);
    }
    REQUIRE(sigpending(&set) == 0 && sigismember(&set, SIGTRAP));
    siginfo_t info;
    sigemptyset(&set);
    sigaddset(&set, SIGTRAP);
    struct timespec now = {0};
    SAME(sigtimedwait(&set, &info, &now), SIGTRAP);
    SAME(info.si_value.sival_int, 42);
    union sigval value = {.sival_int = 42};
    REQUIRE(sigqueue(getpid(), SIGTRAP, value) == 0);
}

static void removed_folder(void) {
    static char link[4096], now[4096];
    if (!begun) {
        char name[] = "/tmp/kedge-features-XXXXXX";
        REQUIRE(mkdtemp(name) && chdir(name) == 0 && rmdir(name) == 0);
        REQUIRE(readlink("/proc/self/cwd", link, sizeof link) > 0);
    }
    REQUIRE(getcwd(now, sizeof now) == 0 && errno == ENOENT);
    memset(now, 0, sizeof now);
    REQUIRE(readlink("/proc/self/cwd", now, sizeof now) > 0);
    SAME(strcmp(link, now), 0);
}

static void removed_folder_that_is_open(void) {
    static int fd;
    if (!begun) {
        char name[] = "/tmp/kedge-features-XXXXXX";
        REQUIRE(mkdtemp(name) && chdir(name) == 0 && (fd = open(".", O_DIRECTORY | O_RDONLY)) >= 0 && rmdir(name) == 0);
    }
    struct stat one, other;
    REQUIRE(fstat(fd, &one) == 0 && stat(".", &other) == 0);
    SAME(one.st_ino, other.st_ino);
    SAME(one.st_nlink, 0);
}

static void folder_of_ended(void) {
    char now[4096];
    if (!begun) {
        pid_t child = fork();
        if (child == 0) for (;;) pause();
        snprintf(now, sizeof now, "/proc/%d", child);
        REQUIRE(chdir(now) == 0 && kill(child, SIGKILL) == 0 && waitpid(child, 0, 0) == child);
    }
    REQUIRE(getcwd(now, sizeof now) == 0 && errno == ENOENT);
}

static void removed_device(void) {
    static int fd;
    dev_t device = makedev(1, 7);
    if (!begun && geteuid() == 0) {
        char name[64];
        snprintf(name, sizeof name, "/tmp/kedge-features-%d", getpid());
        REQUIRE(mknod(name, S_IFCHR | 0640, device) == 0);
        fd = open(name, O_RDWR);
        REQUIRE(unlink(name) == 0 && fd >= 0);
    } else if (!begun) REQUIRE((fd = open("/dev/full", O_RDWR)) >= 0);
    struct stat found;
    REQUIRE(fstat(fd, &found) == 0);
    SAME(found.st_rdev, device);
    if (geteuid() == 0) SAME(found.st_mode, S_IFCHR | 0640);
    SAME(write(fd, "", 1), -1);
    SAME(errno, ENOSPC);
}

// The flags that smaps tells of the mapping at `at`, those that are asked for, a bit each.
static long flags_of(void *at, const char *wanted) {
    char line[1024];
    FILE *smaps = fopen("/proc/self/smaps", "r");
    long here = 0, found = -1;
    unsigned long start, end;
    REQUIRE(smaps);
    while (fgets(line, sizeof line, smaps)) {
        if (sscanf(line, "%lx-%lx ", &start, &end) == 2) here = start == (unsigned long)at;
        if (!here || strncmp(line, "VmFlags:", 8)) continue;
        found = 0;
        for (int bit = 0; wanted[bit * 2]; bit++) {
            char flag[] = {' ', wanted[bit * 2], wanted[bit * 2 + 1], ' ', 0};
            found |= (long)(strstr(line, flag) != 0) << bit;
        }
    }
    fclose(smaps);
    return found;
}

static void *map(size_t bytes) {
    void *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(at != MAP_FAILED);
    return at;
}

static void advice(void) {
    static int kinds[] = {MADV_DONTFORK, MADV_WIPEONFORK, MADV_DONTDUMP, MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_MERGEABLE,
                          MADV_SEQUENTIAL, MADV_RANDOM};
    enum { COUNT = sizeof kinds / sizeof *kinds };
    static uint64_t *at[COUNT];
    for (int i = 0; i < COUNT; i++) {
        // Apart, so that the kernel merges none.
        if (!begun) {
            at[i] = map(64 * PAGE);
            REQUIRE(mprotect(at[i] + 32 * PAGE / 8, 32 * PAGE, PROT_NONE) == 0);
            madvise(at[i], 32 * PAGE, kinds[i]);
            for (int page = 0; page < 32; page += 3) at[i][page * PAGE / 8] = 1000 * i + page + 1;
        }
        KEEP(i, flags_of(at[i], "dcwfddhgnhmgsrrr"));
        for (int page = 0; page < 32; page++) SAME(at[i][page * PAGE / 8], page % 3 ? 0 : 1000 * i + page + 1);
    }
}

// Shared memory and its advice, which a child has not got, or has not got as it is here.
static void advice_on_shared(void) {
    static const int kinds[][2] = {{MADV_DONTFORK, MADV_DONTFORK}, {MADV_DONTDUMP, MADV_DONTDUMP},
                                   {MADV_DONTFORK, MADV_DONTDUMP}};
    static char *shared[3], *own[3];
    for (int i = 0; i < 3; i++) {
        if (!begun) {
            int fd = memfd_create("advice", 0);
            REQUIRE(fd >= 0 && ftruncate(fd, PAGE) == 0);
            shared[i] = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            own[i] = map(3 * PAGE);
            REQUIRE(shared[i] != MAP_FAILED && mprotect(own[i] + PAGE, PAGE, PROT_NONE) == 0);
            for (int j = 0; j < 2; j++) {
                REQUIRE(madvise(shared[i], PAGE, kinds[i][j]) == 0);
                REQUIRE(madvise(own[i], PAGE, kinds[i][j]) == 0);
            }
            shared[i][5] = own[i][5] = 10 + i;
        }
        KEEP(2 * i, flags_of(shared[i], "dcdd"));
        KEEP(2 * i + 1, flags_of(own[i], "dcdd"));
        SAME(flags_of(shared[i], "dcdd"), i + 1);
        SAME(shared[i][5], 10 + i);
        SAME(own[i][5], 10 + i);
    }
}

// Memory that the kernel may drop is dropped by a restart: what random numbers are made of must not
// come twice.
static void droppable(void) {
    static uint64_t *at;
    if (!begun) {
        at = mmap(0, PAGE, PROT_READ | PROT_WRITE, 8 /* MAP_DROPPABLE */ | MAP_ANONYMOUS, -1, 0);
        // Before Linux 6.11.
        if (at == MAP_FAILED) at = map(PAGE);
        else *at = 77;
    }
    KEEP(0, flags_of(at, "dpwfdd"));
    SAME(*at == 77 || *at == 0, 1);
}

// Pages that it has not written are those of the file, which changes.
static void private_views(void) {
    static int fd, nameless;
    static volatile char *shared, *own, *of_nameless;
    static char step;
    if (!begun) {
        char name[] = "/tmp/kedge-features-XXXXXX";
        fd = memfd_create("views", 0);
        nameless = mkstemp(name);
        REQUIRE(fd >= 0 && nameless >= 0 && unlink(name) == 0);
        REQUIRE(ftruncate(fd, 4 * PAGE) == 0 && ftruncate(nameless, 4 * PAGE) == 0);
        shared = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        own = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
        of_nameless = mmap(0, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, nameless, 0);
        REQUIRE(shared != MAP_FAILED && own != MAP_FAILED && of_nameless != MAP_FAILED);
        own[2 * PAGE] = of_nameless[2 * PAGE] = 55;
        // A page of zeros that is its own.
        shared[3 * PAGE] = 9;
        own[3 * PAGE] = 0;
    }
    step++;
    shared[0] = step;
    REQUIRE(pwrite(nameless, &step, 1, PAGE) == 1);
    SAME(own[0], step);
    SAME(of_nameless[PAGE], step);
    SAME(own[2 * PAGE], 55);
    SAME(of_nameless[2 * PAGE], 55);
    SAME(own[3 * PAGE], 0);
}

static void program_in_memory(void) {
    static int fd;
    static const char script[] = "#!/bin/true\n";
    if (!begun) {
        fd = memfd_create("script", 0);
        REQUIRE(fd >= 0 && write(fd, script, sizeof script - 1) == sizeof script - 1);
    }
    pid_t child = fork();
    if (child == 0) {
        char *none[] = {0};
        syscall(SYS_execveat, fd, "", none, none, AT_EMPTY_PATH);
        _exit(100 + errno);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child);
    SAME(status, 0);
}

static void lock_owner(void) {
    static int fd;
    static pid_t child;
    char path[64], text[512] = "", mine[64];
    if (!begun) {
        char name[] = "/tmp/kedge-features-XXXXXX";
        REQUIRE((fd = mkstemp(name)) >= 0 && unlink(name) == 0);
        if ((child = fork()) == 0) {
            REQUIRE(flock(fd, LOCK_EX) == 0);
            for (;;) pause();
        }
    }
    snprintf(path, sizeof path, "/proc/%d/fdinfo/%d", child, fd);
    snprintf(mine, sizeof mine, "FLOCK  ADVISORY  WRITE %d ", child);
    for (int i = 0; i < 500 && !strstr(text, mine); i++) {
        usleep(begun ? 0 : 1000);
        int info = open(path, O_RDONLY | O_CLOEXEC);
        REQUIRE(info >= 0 && read(info, text, sizeof text - 1) > 0);
        close(info);
    }
    REQUIRE(strstr(text, mine));
}

// A file whose first name was removed, and which has another one.
static void other_name(void) {
    static int fd;
    struct stat found;
    if (!begun) {
        char name[] = "/tmp/kedge-features-XXXXXX", other[64];
        fd = mkstemp(name);
        snprintf(other, sizeof other, "%s-other", name);
        REQUIRE(fd >= 0 && write(fd, "x", 1) == 1 && link(name, other) == 0 && unlink(name) == 0);
    }
    REQUIRE(fstat(fd, &found) == 0);
    KEEP(0, found.st_ino);
    SAME(found.st_nlink, 1);
}

// Descriptors of one process that has ended are descriptors of one process.
static void ended_pidfds(void) {
    static int fds[4];
    struct stat found[4];
    if (!begun) for (int i = 0; i < 4; i += 2) {
        pid_t child = fork();
        if (child == 0) for (;;) pause();
        fds[i] = syscall(SYS_pidfd_open, child, 0);
        fds[i + 1] = syscall(SYS_pidfd_open, child, 0);
        REQUIRE(fds[i] >= 0 && fds[i + 1] >= 0 && kill(child, SIGKILL) == 0 && waitpid(child, 0, 0) == child);
    }
    for (int i = 0; i < 4; i++) REQUIRE(fstat(fds[i], &found[i]) == 0);
    SAME(found[0].st_ino, found[1].st_ino);
    SAME(found[2].st_ino, found[3].st_ino);
    // Before Linux 6.9 all of them are one file.
    KEEP(0, found[0].st_ino == found[2].st_ino);
    SAME(syscall(SYS_pidfd_send_signal, fds[0], 0, 0, 0), -1);
    SAME(errno, ESRCH);
}

// Sends a message and the descriptor, if there is one, which it closes.
static void hand(int by, const char *text, int fd) {
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control = {
        .header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    struct iovec part = {(void *)text, strlen(text)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = fd < 0 ? 0 : control.room,
                             .msg_controllen = fd < 0 ? 0 : sizeof control.room};
    SAME(sendmsg(by, &message, 0), strlen(text));
    if (fd >= 0) REQUIRE(close(fd) == 0);
}

// Receives this message; the descriptor that came with it, or -1.
static int take(int by, const char *text) {
    char found[16] = "";
    union { struct cmsghdr header; char room[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {found, strlen(text)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    SAME(recvmsg(by, &message, 0), strlen(text));
    REQUIRE(strcmp(found, text) == 0);
    int fd = -1;
    if (CMSG_FIRSTHDR(&message)) memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
    return fd;
}

// Pipes that no process holds, some at each moment, each with its number in it.
static void under_way(void) {
    enum { WAITING = 4 };
    static const int kinds[] = {SOCK_STREAM, SOCK_SEQPACKET, SOCK_DGRAM};
    static int ends[3][2], sent;
    for (int i = 0; i < 3 && !begun; i++) REQUIRE(socketpair(AF_UNIX, kinds[i], 0, ends[i]) == 0);
    do {
        sent++;
        for (int i = 0; i < 3; i++) {
            int both[2];
            REQUIRE(pipe(both) == 0 && write(both[1], &sent, sizeof sent) == sizeof sent);
            hand(ends[i][0], "plain", -1);
            hand(ends[i][0], "reader", both[0]);
            hand(ends[i][0], "writer", both[1]);
        }
    } while (sent < WAITING);
    for (int i = 0; i < 3; i++) {
        SAME(take(ends[i][1], "plain"), -1);
        int reader = take(ends[i][1], "reader"), writer = take(ends[i][1], "writer"), number;
        REQUIRE(reader >= 0 && writer >= 0 && close(writer) == 0);
        REQUIRE(read(reader, &number, sizeof number) == sizeof number);
        SAME(number, sent - WAITING + 1);
        // Nobody else holds the other end.
        REQUIRE(read(reader, &number, 1) == 0 && close(reader) == 0);
    }
}

static volatile sig_atomic_t signals_told;
static volatile long threads_told[2];

static void note_signal(int signal) {
    if (signal == SIGUSR1) signals_told++;
}

static void note_message(union sigval value) {
    volatile long *told = value.sival_ptr;
    ++*told;
}

static void be_told(mqd_t queue, int means, int which) {
    struct sigevent event = {.sigev_notify = means};
    pthread_attr_t attributes;
    if (means == SIGEV_SIGNAL) event.sigev_signo = SIGUSR1;
    if (means == SIGEV_THREAD) {
        event.sigev_notify_function = note_message;
        event.sigev_value.sival_ptr = (void *)&threads_told[which];
        // One with attributes, which glibc copies and frees when it has told.
        REQUIRE(pthread_attr_init(&attributes) == 0);
        REQUIRE(pthread_attr_setstacksize(&attributes, 1 << 17) == 0);
        if (which == 1) event.sigev_notify_attributes = &attributes;
    }
    REQUIRE(mq_notify(queue, &event) == 0);
}

static void see_how_it_is_told(mqd_t queue, int means, int which) {
    long signals = signals_told, threads = threads_told[which];
    char byte = 3, got[16];
    REQUIRE(mq_send(queue, &byte, 1, 0) == 0);
    for (int tries = 0; tries < 100000; tries++) {
        if (means == SIGEV_SIGNAL ? signals_told != signals : threads_told[which] != threads) break;
        usleep(100);
    }
    SAME(signals_told, signals + (means == SIGEV_SIGNAL));
    SAME(threads_told[which], threads + (means == SIGEV_THREAD));
    REQUIRE(mq_receive(queue, got, sizeof got, 0) == 1 && got[0] == byte);
    // It was told once, and asks again.
    be_told(queue, means, which);
}

static void told_of_messages(void) {
    // A checkpoint is refused while a thread has not read that it is told: they are told before the
    // first step is, and long after the last one at which the program is met.
    enum { QUEUES = 4, ONCE_IN = 40, AFTER = 200 };
    static const int means[QUEUES] = {SIGEV_NONE, SIGEV_SIGNAL, SIGEV_THREAD, SIGEV_THREAD};
    static mqd_t queues[QUEUES];
    static int step;
    struct mq_attr limits = {.mq_maxmsg = 4, .mq_msgsize = 16};
    if (!begun) {
        struct sigaction action = {.sa_handler = note_signal, .sa_flags = SA_RESTART};
        REQUIRE(sigaction(SIGUSR1, &action, 0) == 0);
        for (int i = 0; i < QUEUES; i++) {
            char name[64];
            snprintf(name, sizeof name, "/kedge-told-%d-%d", getpid(), i);
            queues[i] = mq_open(name, O_CREAT | O_EXCL | O_RDWR | O_NONBLOCK, 0600, &limits);
            REQUIRE(queues[i] >= 0 && mq_unlink(name) == 0);
            be_told(queues[i], means[i], i == 3);
            if (i > 0) see_how_it_is_told(queues[i], means[i], i == 3);
        }
    }
    struct sigevent other = {.sigev_notify = SIGEV_NONE};
    for (int i = 0; i < QUEUES; i++) {
        REQUIRE(mq_notify(queues[i], &other) == -1);
        SAME(errno, EBUSY);
        const int is_told = step > AFTER && step % ONCE_IN == ONCE_IN - 1;
        if (i > 0 && is_told) see_how_it_is_told(queues[i], means[i], i == 3);
    }
    step++;
}

static const struct { const char *name; void (*look)(void); } FEATURES[] = {
    {"attributes", attributes}, {"bound", bound}, {"dumpable", dumpable}, {"undumpable", undumpable}, {"sessions", sessions},
    {"ended_leader", ended_leader}, {"subreaper", subreaper}, {"terminal_owner", terminal_owner}, {"stopped", stopped}, {"trap", trap},
    {"removed_folder", removed_folder}, {"removed_folder_that_is_open", removed_folder_that_is_open},
    {"folder_of_ended", folder_of_ended}, {"removed_device", removed_device}, {"advice", advice},
    {"advice_on_shared", advice_on_shared},
    {"droppable", droppable}, {"private_views", private_views}, {"program_in_memory", program_in_memory},
    {"lock_owner", lock_owner}, {"other_name", other_name}, {"ended_pidfds", ended_pidfds},
    {"under_way", under_way}, {"told_of_messages", told_of_messages},
    {"file_of_a_worker", file_of_a_worker},
};

int main(int argc, char **argv) {
    void (*look)(void) = 0;
    for (unsigned i = 0; i < sizeof FEATURES / sizeof *FEATURES; i++)
        if (argc > 2 && strcmp(argv[1], FEATURES[i].name) == 0) look = FEATURES[i].look;
    if (!look) return 1;
    int steps = atoi(argv[2]);
    outer_group = getpgid(0);
    outer_session = getsid(0);
    REQUIRE(pipe(ready) == 0);
    ending = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    REQUIRE(ending != MAP_FAILED);
    look();
    begun = 1;
    uint64_t *nonce = malloc(1 << 20);
    REQUIRE(getrandom(nonce, sizeof *nonce, 0) == sizeof *nonce);
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        char line[128];
        look();
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum, nonce[step]);
        REQUIRE(write(1, line, length) == length);
        usleep(2000);
    }
    // Whatever is left ends with it.
    *ending = 1;
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", getpid());
    for (int tries = 0; tries < 100; tries++) {
        int children[64], count = 0;
        FILE *file = fopen(path, "r");
        while (file && count < 64 && fscanf(file, "%d", &children[count]) == 1) count++;
        if (file) fclose(file);
        if (count == 0) break;
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        for (int i = 0; i < count; i++) kill(children[i], SIGKILL);
        while (waitpid(-1, 0, WNOHANG) > 0) {}
        usleep(1000);
    }
    return 7;
}
