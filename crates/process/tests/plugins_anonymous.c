/* What has no path. */
#include "plugins_child.h"
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <termios.h>
#include <time.h>

static void make_memfd(void) {
    put(memfd_create("with a name", MFD_CLOEXEC | MFD_ALLOW_SEALING), 10);
    say(10, "some contents");
    EXPECT(fcntl(10, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) == 0);
    put(open("/proc/self/fd/10", O_RDONLY), 11);
    put(memfd_create("plain", 0), 12);
    EXPECT(pwrite(12, "x", 1, 1l << 32) == 1);
}

static void check_memfd(int role) {
    char link[64] = {0};
    EXPECT(readlink("/proc/self/fd/10", link, 63) > 0 && strcmp(link, "/memfd:with a name (deleted)") == 0);
    expect_text(11, "some contents");
    EXPECT(lseek(10, 0, SEEK_CUR) == 13);
    EXPECT(fcntl(10, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE));
    EXPECT(write(10, "x", 1) == -1 && errno == EPERM);
    EXPECT((fcntl(11, F_GETFL) & O_ACCMODE) == O_RDONLY);
    EXPECT(fcntl(12, F_GET_SEALS) == F_SEAL_SEAL);
    struct stat stat;
    EXPECT(fstat(12, &stat) == 0 && stat.st_size == (1l << 32) + 1 && stat.st_blocks < 100);
}

static void make_eventfd(void) {
    uint64_t large = UINT64_MAX - 1;
    put(eventfd(3, 0), 10);
    put(eventfd(2, EFD_SEMAPHORE | EFD_NONBLOCK), 11);
    put(eventfd(0, EFD_NONBLOCK), 12);
    put(eventfd(0, 0), 13);
    EXPECT(write(13, &large, 8) == 8);
}

static void check_eventfd(int role) {
    uint64_t count;
    EXPECT(read(10, &count, 8) == 8 && count == 3);
    EXPECT(fcntl(10, F_GETFL) == O_RDWR);
    EXPECT(read(11, &count, 8) == 8 && count == 1);
    EXPECT(read(11, &count, 8) == 8 && count == 1);
    EXPECT(read(11, &count, 8) == -1 && errno == EAGAIN);
    EXPECT(read(12, &count, 8) == -1 && errno == EAGAIN);
    EXPECT(read(13, &count, 8) == 8 && count == UINT64_MAX - 1);
}

static struct itimerspec in_seconds(time_t value, time_t interval) {
    return (struct itimerspec){.it_value.tv_sec = value, .it_interval.tv_sec = interval};
}

static void make_timerfd(void) {
    put(timerfd_create(CLOCK_MONOTONIC, 0), 10);
    put(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK), 11);
    put(timerfd_create(CLOCK_REALTIME, 0), 12);
    put(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK), 13);
    struct itimerspec times = in_seconds(1000, 7);
    EXPECT(timerfd_settime(10, 0, &times, NULL) == 0);
    times = in_seconds(4000000000, 0);
    EXPECT(timerfd_settime(12, TFD_TIMER_ABSTIME, &times, NULL) == 0);
    times = (struct itimerspec){.it_value.tv_nsec = 1};
    EXPECT(timerfd_settime(13, 0, &times, NULL) == 0);
    struct pollfd one = {13, POLLIN, 0};
    EXPECT(poll(&one, 1, 10000) == 1);
}

static void check_timerfd(int role) {
    struct itimerspec times;
    uint64_t ticks;
    EXPECT(timerfd_gettime(10, &times) == 0);
    EXPECT(times.it_value.tv_sec > 900 && times.it_value.tv_sec < 1000 && times.it_interval.tv_sec == 7);
    EXPECT(timerfd_gettime(11, &times) == 0 && times.it_value.tv_sec == 0 && times.it_value.tv_nsec == 0);
    EXPECT(read(11, &ticks, 8) == -1 && errno == EAGAIN);
    /* A date stays that date. */
    EXPECT(timerfd_gettime(12, &times) == 0);
    time_t when = time(NULL) + times.it_value.tv_sec;
    EXPECT(when >= 3999999998 && when <= 4000000001);
    EXPECT(read(13, &ticks, 8) == 8 && ticks == 1);
    EXPECT(read(13, &ticks, 8) == -1 && errno == EAGAIN);
}

static void make_signalfd(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGRTMAX);
    put(signalfd(-1, &set, SFD_NONBLOCK), 10);
    put(epoll_create1(0), 11);
    struct epoll_event event = {EPOLLIN, {.u64 = 7}};
    EXPECT(epoll_ctl(11, EPOLL_CTL_ADD, 10, &event) == 0);
}

static void check_signalfd(int role) {
    sigset_t set;
    sigfillset(&set);
    sigprocmask(SIG_BLOCK, &set, NULL);
    struct epoll_event event;
    EXPECT(epoll_wait(11, &event, 1, 0) == 0);
    struct signalfd_siginfo info;
    int numbers[] = {SIGUSR1, SIGRTMAX};
    for (int i = 0; i < 2; i++) {
        raise(numbers[i]);
        EXPECT(epoll_wait(11, &event, 1, 1000) == 1 && event.data.u64 == 7);
        EXPECT(read(10, &info, sizeof info) == sizeof info && (int)info.ssi_signo == numbers[i]);
    }
    raise(SIGUSR2);
    EXPECT(read(10, &info, sizeof info) == -1 && errno == EAGAIN);
}

static void make_pidfd(void) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    put(ends[0], 20);
    put(ends[1], 21);
    fork_role(NULL);
    put(syscall(SYS_pidfd_open, others[0], 0), 10);
    int short_lived = fork();
    if (short_lived == 0)
        _exit(0);
    put(syscall(SYS_pidfd_open, short_lived, O_NONBLOCK), 11);
    EXPECT(waitpid(short_lived, NULL, 0) == short_lived);
    EXPECT(dup3(10, 12, O_CLOEXEC) == 12);
    put(epoll_create1(0), 13);
    struct epoll_event event = {EPOLLIN, {.u64 = 9}};
    EXPECT(epoll_ctl(13, EPOLL_CTL_ADD, 10, &event) == 0);
}

static void check_pidfd(int role) {
    if (role == 1) {
        sigset_t set;
        sigfillset(&set);
        sigprocmask(SIG_BLOCK, &set, NULL);
        say(21, "x");
        int signal;
        EXPECT(sigwait(&set, &signal) == 0 && signal == SIGUSR1);
        return;
    }
    expect_text(20, "x");
    struct epoll_event event;
    EXPECT(epoll_wait(13, &event, 1, 0) == 0);
    EXPECT(syscall(SYS_pidfd_send_signal, 10, SIGUSR1, NULL, 0) == 0);
    EXPECT(epoll_wait(13, &event, 1, 10000) == 1 && event.data.u64 == 9);
    struct pollfd ended = {11, POLLIN, 0};
    EXPECT(poll(&ended, 1, 0) == 1);
    EXPECT(syscall(SYS_pidfd_send_signal, 11, 0, NULL, 0) == -1 && errno == ESRCH);
    EXPECT(fcntl(11, F_GETFL) & O_NONBLOCK);
}

static void make_inotify(void) {
    put(inotify_init1(IN_NONBLOCK), 10);
    EXPECT(mkdir("folder", 0700) == 0);
    EXPECT(mkdir("folder/deep", 0700) == 0);
    put(open("folder/file", O_RDWR | O_CREAT, 0600), 11);
    EXPECT(inotify_add_watch(10, "folder", IN_CREATE) == 1);
    EXPECT(inotify_add_watch(10, "folder/file", IN_MODIFY | IN_ONESHOT) == 2);
    EXPECT(inotify_rm_watch(10, 1) == 0);
    EXPECT(inotify_add_watch(10, "folder/deep", IN_CREATE) == 3);
    char buffer[4096];
    EXPECT(read(10, buffer, sizeof buffer) > 0);
}

static void expect_event(int watch, uint32_t mask) {
    char buffer[4096] __attribute__((aligned(8)));
    EXPECT(read(10, buffer, sizeof buffer) > 0);
    struct inotify_event *event = (void *)buffer;
    EXPECT(event->wd == watch && event->mask == mask);
}

static void check_inotify(int role) {
    say(11, "x");
    expect_event(2, IN_MODIFY);
    put(open("folder/deep/new", O_RDWR | O_CREAT, 0600), 12);
    expect_event(3, IN_CREATE);
    EXPECT(inotify_add_watch(10, ".", IN_CREATE) == 4);
}

static void watch(int epoll, int fd, uint32_t events, uint64_t data) {
    struct epoll_event event = {events, {.u64 = data}};
    EXPECT(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0);
}

static void make_epoll(void) {
    put(epoll_create1(EPOLL_CLOEXEC), 10);
    int ends[2];
    EXPECT(pipe(ends) == 0);
    put(ends[0], 20);
    put(ends[1], 21);
    put(eventfd(0, 0), 22);
    watch(10, 20, EPOLLIN, 1);
    watch(10, 22, EPOLLIN | EPOLLET, UINT64_MAX);
    /* Its number is another file's by now. */
    put(eventfd(0, 0), 23);
    watch(10, 23, EPOLLIN, 3);
    EXPECT(dup2(23, 24) == 24);
    put(open("/dev/null", O_RDWR), 25);
    EXPECT(dup2(25, 23) == 23);
    put(epoll_create1(0), 11);
    watch(11, 10, EPOLLIN, 4);
    fork_role(NULL);
}

static uint64_t next_event(int epoll) {
    struct epoll_event event;
    EXPECT(epoll_wait(epoll, &event, 1, 1000) == 1);
    return event.data.u64;
}

static void check_epoll(int role) {
    if (role == 1)
        return;
    struct epoll_event event;
    EXPECT(epoll_wait(11, &event, 1, 0) == 0);
    say(21, "x");
    EXPECT(next_event(11) == 4);
    EXPECT(next_event(10) == 1);
    expect_text(20, "x");
    uint64_t one = 1;
    EXPECT(write(22, &one, 8) == 8);
    EXPECT(next_event(10) == UINT64_MAX);
    EXPECT(epoll_wait(10, &event, 1, 0) == 0);
    EXPECT(write(24, &one, 8) == 8);
    EXPECT(next_event(10) == 3);
    EXPECT(read(24, &one, 8) == 8);
    /* The program's own numbers are those that the epoll knows. */
    EXPECT(epoll_ctl(10, EPOLL_CTL_DEL, 20, NULL) == 0);
    EXPECT(epoll_ctl(10, EPOLL_CTL_DEL, 22, NULL) == 0);
    EXPECT(epoll_ctl(10, EPOLL_CTL_DEL, 24, NULL) == -1 && errno == ENOENT);
    EXPECT(dup2(24, 23) == 23);
    EXPECT(epoll_ctl(10, EPOLL_CTL_DEL, 23, NULL) == 0);
}

static void make_pty(void) {
    EXPECT(setsid() == getpid());
    put(posix_openpt(O_RDWR | O_NOCTTY), 10);
    EXPECT(grantpt(10) == 0 && unlockpt(10) == 0);
    put(open(ptsname(10), O_RDWR), 11);
    put(open("/dev/tty", O_RDWR), 12);
    if (geteuid() == 0)
        EXPECT(fchown(11, 1234, 1235) == 0 && fchmod(11, 0602) == 0);
    struct winsize size = {40, 100, 0, 0};
    EXPECT(ioctl(10, TIOCSWINSZ, &size) == 0);
    struct termios settings;
    EXPECT(tcgetattr(11, &settings) == 0);
    settings.c_lflag &= ~ECHO;
    settings.c_cc[VINTR] = 'q';
    EXPECT(tcsetattr(11, TCSANOW, &settings) == 0);
    say(11, "a line\n");
    say(10, "typed\nhalf");
    struct pollfd both[2] = {{10, POLLIN, 0}, {11, POLLIN, 0}};
    while (poll(both, 2, 1000) != 2)
        ;
    EXPECT(fcntl(10, F_SETFL, O_NONBLOCK) == 0);
}

static void check_pty(int role) {
    struct stat stat;
    EXPECT(fstat(11, &stat) == 0);
    if (geteuid() == 0)
        EXPECT(stat.st_uid == 1234 && stat.st_gid == 1235 && (stat.st_mode & 07777) == 0602);
    struct winsize size;
    EXPECT(ioctl(11, TIOCGWINSZ, &size) == 0 && size.ws_row == 40 && size.ws_col == 100);
    struct termios settings;
    EXPECT(tcgetattr(11, &settings) == 0);
    EXPECT(!(settings.c_lflag & ECHO) && (settings.c_lflag & ICANON) && settings.c_cc[VINTR] == 'q');
    EXPECT(settings.c_oflag & OPOST);
    char buffer[64] = {0};
    EXPECT(read(10, buffer, 64) == 8 && strcmp(buffer, "a line\r\n") == 0);
    EXPECT(read(10, buffer, 64) == -1 && errno == EAGAIN);
    expect_text(11, "typed\n");
    say(10, " a line\n");
    expect_text(11, "half a line\n");
    int terminal = open("/dev/tty", O_RDWR);
    EXPECT(terminal >= 0 && tcgetpgrp(terminal) == getpgrp() && tcgetsid(terminal) == getpid());
    EXPECT(tcgetsid(12) == getpid());
    EXPECT(ioctl(12, TIOCGWINSZ, &size) == 0 && size.ws_col == 100);
    signal(SIGHUP, SIG_IGN);
    EXPECT(close(11) == 0 && close(12) == 0 && close(terminal) == 0);
    EVENTUALLY(read(10, buffer, 64) == -1 && errno == EIO);
}

static void make_own(void) {
    put(open("/proc/self/limits", O_RDONLY), 10);
    expect_text(10, "Limit");
    put(open("/proc/self/fd", O_RDONLY | O_DIRECTORY), 11);
}

static void check_own(int role) {
    expect_text(10, "     ");
    EXPECT(faccessat(11, "10", F_OK, AT_SYMLINK_NOFOLLOW) == 0);
}

const struct scenario scenarios[] = {
    {"memfd", make_memfd, check_memfd},
    {"eventfd", make_eventfd, check_eventfd},
    {"timerfd", make_timerfd, check_timerfd},
    {"signalfd", make_signalfd, check_signalfd},
    {"pidfd", make_pidfd, check_pidfd},
    {"inotify", make_inotify, check_inotify},
    {"epoll", make_epoll, check_epoll},
    {"pty", make_pty, check_pty},
    {"own", make_own, check_own},
    {0},
};
