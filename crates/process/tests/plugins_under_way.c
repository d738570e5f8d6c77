/* Descriptors that are under way in Unix sockets, and that no process holds. */
#include "plugins_child.h"
#include <netinet/in.h>
#include <pty.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>

#define MOST 253
/* Of Linux 6.5 and 6.16: senders' pidfds, and whether descriptors may be sent. */
#ifndef SO_PASSPIDFD
#define SO_PASSPIDFD 76
#endif
#ifndef SO_PASSRIGHTS
#define SO_PASSRIGHTS 83
#endif

static void pair(int type, int a, int b) {
    int ends[2];
    EXPECT(socketpair(AF_UNIX, type, 0, ends) == 0);
    put(ends[0], a);
    put(ends[1], b);
}

/* Sends the text and these descriptors, and closes them. */
static void hand(int by, const char *text, int count, const int *fds) {
    char control[CMSG_SPACE(sizeof(int) * MOST)] = {0};
    struct iovec vector = {(void *)text, strlen(text)};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = CMSG_SPACE(sizeof(int) * count)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int) * count);
    memcpy(CMSG_DATA(header), fds, sizeof(int) * count);
    EXPECT(sendmsg(by, &message, 0) == (ssize_t)strlen(text));
    for (int i = 0; i < count; i++)
        EXPECT(close(fds[i]) == 0);
}

static void hand_one(int by, const char *text, int fd) {
    EXPECT(fd >= 0);
    hand(by, text, 1, &fd);
}

/* Receives at most `room` bytes, which are this text; returns how many descriptors came with it. */
static int take(int by, size_t room, const char *text, int *fds) {
    char data[4096] = {0}, control[CMSG_SPACE(sizeof(int) * MOST)];
    struct iovec vector = {data, room};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t got = recvmsg(by, &message, MSG_DONTWAIT);
    EXPECT(got == (ssize_t)strlen(text) && memcmp(data, text, got) == 0);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header)
        return 0;
    EXPECT(header->cmsg_type == SCM_RIGHTS && !CMSG_NXTHDR(&message, header));
    int count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(fds, CMSG_DATA(header), sizeof(int) * count);
    return count;
}

static int take_one(int by, const char *text) {
    int fd;
    EXPECT(take(by, 4096, text, &fd) == 1);
    return fd;
}

static void nothing_waits(int fd) {
    char byte;
    EXPECT(recv(fd, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

static int is_same(int a, int b) {
    return syscall(SYS_kcmp, getpid(), getpid(), 0, a, b) == 0;
}

/* Both ends of a pipe, with this text in it. */
static void hand_pipe(int by, const char *text, const char *within) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    say(ends[1], within);
    hand(by, text, 2, ends);
}

static void expect_pipe(const int *ends, const char *within) {
    expect_text(ends[0], within);
    say(ends[1], "more");
    expect_text(ends[0], "more");
    EXPECT(close(ends[1]) == 0);
    /* Nobody else has the end for writing. */
    char byte;
    EVENTUALLY(read(ends[0], &byte, 1) == 0);
    EXPECT(close(ends[0]) == 0);
}

/* Boundaries of a stream are those of what has descriptors. */
static void make_streams(void) {
    for (int fd = 10; fd < 14; fd += 2) {
        pair(SOCK_STREAM, fd, fd + 1);
        say(fd, "be");
        say(fd, "fore");
        hand_pipe(fd, "first", "one");
        say(fd, "then");
        hand_pipe(fd, "second", "two");
        hand_pipe(fd, "third", "three");
        say(fd, "end");
    }
    /* The sender is gone, and so is who would read. */
    pair(SOCK_STREAM, 14, 15);
    hand_pipe(14, "bequest", "four");
    EXPECT(close(14) == 0);
}

static void check_streams(int role) {
    int fds[MOST];
    /* Who reads with much room. */
    EXPECT(take(11, 4096, "beforefirst", fds) == 2);
    expect_pipe(fds, "one");
    EXPECT(take(11, 4096, "thensecond", fds) == 2);
    expect_pipe(fds, "two");
    EXPECT(take(11, 4096, "third", fds) == 2);
    expect_pipe(fds, "three");
    EXPECT(take(11, 4096, "end", fds) == 0);
    nothing_waits(11);
    /* Who reads exactly what was sent, or a byte. */
    EXPECT(take(13, 6, "before", fds) == 0);
    EXPECT(take(13, 1, "f", fds) == 2);
    expect_pipe(fds, "one");
    EXPECT(take(13, 4, "irst", fds) == 0);
    EXPECT(take(13, 4, "then", fds) == 0);
    EXPECT(take(13, 6, "second", fds) == 2);
    expect_pipe(fds, "two");
    /* They are closed with the bytes that nobody asks for them with. */
    char data[8];
    EXPECT(read(13, data, 5) == 5 && memcmp(data, "third", 5) == 0);
    EXPECT(take(13, 4096, "end", fds) == 0);
    say(10, "new");
    expect_text(11, "new");
    EXPECT(take(15, 4096, "bequest", fds) == 2);
    expect_pipe(fds, "four");
    expect_end(15);
}

static void make_messages(void) {
    for (int fd = 10; fd < 14; fd += 2) {
        pair(fd == 10 ? SOCK_DGRAM : SOCK_SEQPACKET, fd, fd + 1);
        hand_pipe(fd, "", "empty");
        say(fd, "plain");
        hand_pipe(fd, "first", "one");
        hand_pipe(fd, "second", "two");
        say(fd, "end");
    }
    /* By name, from nobody. */
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 14);
    struct sockaddr_un address = {AF_UNIX, "receiver"};
    EXPECT(bind(14, (void *)&address, sizeof address) == 0);
    int by = socket(AF_UNIX, SOCK_DGRAM, 0);
    EXPECT(connect(by, (void *)&address, sizeof address) == 0);
    hand_pipe(by, "named", "three");
    EXPECT(close(by) == 0);
}

static void check_messages(int role) {
    int fds[MOST];
    for (int fd = 10; fd < 14; fd += 2) {
        EXPECT(take(fd + 1, 4096, "", fds) == 2);
        expect_pipe(fds, "empty");
        EXPECT(take(fd + 1, 4096, "plain", fds) == 0);
        EXPECT(take(fd + 1, 4096, "first", fds) == 2);
        expect_pipe(fds, "one");
        EXPECT(take(fd + 1, 4096, "second", fds) == 2);
        expect_pipe(fds, "two");
        EXPECT(take(fd + 1, 4096, "end", fds) == 0);
        nothing_waits(fd + 1);
    }
    EXPECT(take(14, 4096, "named", fds) == 2);
    expect_pipe(fds, "three");
}

/* A message without data that waits behind another is shown once. */
static void make_hidden(void) {
    pair(SOCK_DGRAM, 10, 11);
    say(10, "front");
    hand_pipe(10, "", "hidden");
}

static void check_hidden(int role) {
    int fds[MOST];
    EXPECT(take(11, 4096, "front", fds) == 0);
    EXPECT(take(11, 4096, "", fds) == 2);
    expect_pipe(fds, "hidden");
}

static void make_kinds(void) {
    pair(SOCK_STREAM, 10, 11);
    int fd = open("offset", O_RDWR | O_CREAT | O_APPEND, 0600);
    say(fd, "a file's text");
    EXPECT(lseek(fd, 7, SEEK_SET) == 7);
    EXPECT(flock(fd, LOCK_EX) == 0);
    hand_one(10, "offset", fd);
    fd = open("gone", O_RDWR | O_CREAT, 0600);
    say(fd, "removed");
    EXPECT(unlink("gone") == 0);
    hand_one(10, "gone", fd);
    hand_one(10, "folder", open(".", O_RDONLY | O_DIRECTORY));
    hand_one(10, "null", open("/dev/null", O_RDWR));
    fd = memfd_create("kept", MFD_ALLOW_SEALING);
    say(fd, "in memory");
    EXPECT(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_WRITE) == 0);
    hand_one(10, "memfd", fd);
    hand_one(10, "eventfd", eventfd(41, EFD_NONBLOCK));
    fd = timerfd_create(CLOCK_MONOTONIC, 0);
    struct itimerspec hour = {.it_value.tv_sec = 3600};
    EXPECT(timerfd_settime(fd, 0, &hour, NULL) == 0);
    hand_one(10, "timerfd", fd);
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    EXPECT(sigprocmask(SIG_BLOCK, &mask, NULL) == 0);
    hand_one(10, "signalfd", signalfd(-1, &mask, 0));
    /* The slave is held, its master is not. */
    int master, slave;
    EXPECT(openpty(&master, &slave, NULL, NULL, NULL) == 0);
    put(slave, 12);
    hand_one(10, "master", master);
    /* A pipe of which one end is held. */
    int ends[2];
    EXPECT(pipe(ends) == 0);
    put(ends[0], 13);
    say(ends[1], "from the other end");
    hand_one(10, "end", ends[1]);
    /* An epoll that is under way, and one that watches what is. */
    int counter = eventfd(0, 0), epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77};
    put(epoll_create1(0), 14);
    EXPECT(epoll_ctl(epoll, EPOLL_CTL_ADD, counter, &event) == 0);
    EXPECT(epoll_ctl(14, EPOLL_CTL_ADD, counter, &event) == 0);
    hand(10, "epoll", 2, (int[]){epoll, counter});
}

static int polled(int epoll) {
    struct epoll_event event;
    int count = epoll_wait(epoll, &event, 1, 0);
    EXPECT(count <= 0 || event.data.u64 == 77);
    return count;
}

static void check_kinds(int role) {
    char text[32] = {0};
    int fd = take_one(11, "offset");
    EXPECT(read(fd, text, sizeof text) == 6 && strcmp(text, "s text") == 0);
    EXPECT(fcntl(fd, F_GETFL) & O_APPEND);
    int other = open("offset", O_RDWR);
    EXPECT(flock(other, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
    EXPECT(close(fd) == 0);
    EVENTUALLY(flock(other, LOCK_EX | LOCK_NB) == 0);
    fd = take_one(11, "gone");
    struct stat found;
    EXPECT(fstat(fd, &found) == 0 && found.st_nlink == 0);
    EXPECT(pread(fd, text, sizeof text, 0) == 7 && memcmp(text, "removed", 7) == 0);
    EXPECT(faccessat(take_one(11, "folder"), "offset", R_OK, 0) == 0);
    say(take_one(11, "null"), "anything");
    fd = take_one(11, "memfd");
    EXPECT(pread(fd, text, sizeof text, 0) == 9 && memcmp(text, "in memory", 9) == 0);
    EXPECT(fcntl(fd, F_GET_SEALS) == (F_SEAL_GROW | F_SEAL_WRITE));
    uint64_t count;
    fd = take_one(11, "eventfd");
    EXPECT(read(fd, &count, 8) == 8 && count == 41);
    EXPECT(read(fd, &count, 8) == -1 && errno == EAGAIN);
    struct itimerspec left;
    EXPECT(timerfd_gettime(take_one(11, "timerfd"), &left) == 0);
    EXPECT(left.it_value.tv_sec > 3000 && left.it_value.tv_sec < 3600);
    fd = take_one(11, "signalfd");
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGUSR2);
    EXPECT(sigprocmask(SIG_BLOCK, &mask, NULL) == 0 && raise(SIGUSR2) == 0);
    struct signalfd_siginfo signal;
    EXPECT(read(fd, &signal, sizeof signal) == sizeof signal && signal.ssi_signo == SIGUSR2);
    fd = take_one(11, "master");
    say(fd, "line\n");
    EXPECT(read(12, text, sizeof text) == 5 && memcmp(text, "line\n", 5) == 0);
    expect_text(13, "from the other end");
    EXPECT(close(take_one(11, "end")) == 0);
    EVENTUALLY(read(13, text, 1) == 0);
    int both[2];
    EXPECT(take(11, 4096, "epoll", both) == 2);
    EXPECT(polled(both[0]) == 0 && polled(14) == 0);
    count = 1;
    EXPECT(write(both[1], &count, 8) == 8);
    EXPECT(polled(both[0]) == 1 && polled(14) == 1);
    nothing_waits(11);
}

/* A description is one, wherever it is. */
static void make_shared(void) {
    pair(SOCK_STREAM, 10, 11);
    pair(SOCK_DGRAM, 12, 13);
    int fd = open("shared", O_RDWR | O_CREAT, 0600);
    say(fd, "0123456789");
    EXPECT(lseek(fd, 2, SEEK_SET) == 2);
    put(open("held", O_RDWR | O_CREAT, 0600), 14);
    hand(10, "both", 2, (int[]){dup(fd), dup(14)});
    hand(12, "again", 3, (int[]){dup(fd), fd, dup(14)});
}

static void check_shared(int role) {
    int one[2], other[3];
    EXPECT(take(11, 4096, "both", one) == 2);
    EXPECT(take(13, 4096, "again", other) == 3);
    EXPECT(is_same(one[0], other[0]) && is_same(one[0], other[1]) && !is_same(one[0], one[1]));
    EXPECT(is_same(one[1], 14) && is_same(other[2], 14));
    char text[4];
    EXPECT(read(one[0], text, 4) == 4 && read(other[0], text, 4) == 4 && memcmp(text, "6789", 4) == 0);
}

/* Sockets that are under way, with what waits in them: up to themselves. */
static void make_nested(void) {
    pair(SOCK_STREAM, 10, 11);
    int outer[2], inner[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, outer) == 0);
    EXPECT(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, inner) == 0);
    hand_pipe(inner[0], "deep", "at last");
    hand(outer[0], "inner", 2, inner);
    hand(10, "outer", 2, outer);
    int own[2];
    EXPECT(socketpair(AF_UNIX, SOCK_DGRAM, 0, own) == 0);
    hand(own[0], "itself", 1, (int[]){dup(own[1])});
    hand(10, "own", 2, own);
    /* Somebody listens, and a connection: all under way. */
    struct sockaddr_un address = {AF_UNIX, "listener"};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT(bind(listener, (void *)&address, sizeof address) == 0 && listen(listener, 3) == 0);
    hand_one(10, "listener", listener);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int any = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(bind(any, (void *)&at, sizeof at) == 0 && listen(any, 1) == 0);
    EXPECT(getsockname(any, (void *)&at, &length) == 0);
    EXPECT(connect(client, (void *)&at, sizeof at) == 0);
    put(accept(any, NULL, NULL), 12);
    EXPECT(close(any) == 0);
    say(client, "over tcp");
    hand_one(10, "client", client);
}

static void check_nested(int role) {
    int outer[2], inner[2], ends[2], own[2];
    EXPECT(take(11, 4096, "outer", outer) == 2);
    EXPECT(take(outer[1], 4096, "inner", inner) == 2);
    EXPECT(take(inner[1], 4096, "deep", ends) == 2);
    expect_pipe(ends, "at last");
    say(outer[1], "back");
    expect_text(outer[0], "back");
    EXPECT(take(11, 4096, "own", own) == 2);
    int itself = take_one(own[1], "itself");
    EXPECT(is_same(itself, own[1]));
    nothing_waits(itself);
    int listener = take_one(11, "listener");
    struct sockaddr_un address = {AF_UNIX, "listener"};
    int connecting = socket(AF_UNIX, SOCK_STREAM, 0);
    EXPECT(connect(connecting, (void *)&address, sizeof address) == 0);
    int accepted = accept(listener, NULL, NULL);
    say(connecting, "hello");
    expect_text(accepted, "hello");
    int client = take_one(11, "client");
    expect_text(12, "over tcp");
    say(12, "answer");
    expect_text(client, "answer");
}

/* As many as a message takes, and a long queue of them. */
static void make_many(void) {
    pair(SOCK_SEQPACKET, 10, 11);
    int fds[MOST];
    for (int i = 0; i < MOST; i++) {
        fds[i] = i % 2 ? fds[i - 1] : eventfd(i, 0);
        if (i % 2)
            EXPECT((fds[i] = dup(fds[i])) >= 0);
    }
    hand(10, "all", MOST, fds);
    for (int i = 0; i < 100; i++)
        hand_one(10, "one", eventfd(1000 + i, 0));
}

static void check_many(int role) {
    int fds[MOST];
    uint64_t count;
    EXPECT(take(11, 4096, "all", fds) == MOST);
    for (int i = 0; i < MOST; i += 2) {
        EXPECT(i + 1 == MOST || is_same(fds[i], fds[i + 1]));
        if (i > 0)
            EXPECT(read(fds[i], &count, 8) == 8 && count == (uint64_t)i);
    }
    for (int i = 0; i < MOST; i++)
        EXPECT(close(fds[i]) == 0);
    for (int i = 0; i < 100; i++) {
        int fd = take_one(11, "one");
        EXPECT(read(fd, &count, 8) == 8 && count == (uint64_t)(1000 + i) && close(fd) == 0);
    }
}

static int is_on(int fd, int option) {
    int on = 0;
    socklen_t length = sizeof on;
    return getsockopt(fd, SOL_SOCKET, option, &on, &length) == 0 ? on : -1;
}

/* Whoever reads is told who has sent, or takes no more descriptors than wait. */
static void make_told(void) {
    const int kinds[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET};
    int on = 1, none = 0;
    for (int i = 0; i < 3; i++) {
        int by = 10 + 2 * i, fds[MOST];
        pair(kinds[i], by, by + 1);
        for (int k = 0; k < MOST; k++)
            EXPECT((fds[k] = k ? dup(fds[0]) : eventfd(41, 0)) >= 0);
        hand(by, "all", MOST, fds);
        EXPECT(setsockopt(by + 1, SOL_SOCKET, SO_PASSCRED, &on, sizeof on) == 0);
        if (is_on(by + 1, SO_PASSPIDFD) == 0)
            EXPECT(setsockopt(by + 1, SOL_SOCKET, SO_PASSPIDFD, &on, sizeof on) == 0);
        if (is_on(by + 1, SO_PASSRIGHTS) == 1)
            EXPECT(setsockopt(by + 1, SOL_SOCKET, SO_PASSRIGHTS, &none, sizeof none) == 0);
    }
}

static void check_told(int role) {
    for (int by = 10; by < 16; by += 2) {
        int fds[MOST], none = 0;
        uint64_t count;
        EXPECT(is_on(by + 1, SO_PASSCRED) == 1 && is_on(by + 1, SO_PASSPIDFD) != 0);
        EXPECT(is_on(by + 1, SO_PASSRIGHTS) <= 0);
        EXPECT(setsockopt(by + 1, SOL_SOCKET, SO_PASSCRED, &none, sizeof none) == 0);
        setsockopt(by + 1, SOL_SOCKET, SO_PASSPIDFD, &none, sizeof none);
        EXPECT(take(by + 1, 4096, "all", fds) == MOST);
        EXPECT(read(fds[MOST - 1], &count, 8) == 8 && count == 41);
    }
}

/* More than a process may have by default. */
#define MANY 1200

static void make_thousand(void) {
    struct rlimit limit;
    EXPECT(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    limit.rlim_cur = limit.rlim_max;
    EXPECT(limit.rlim_max > MANY && setrlimit(RLIMIT_NOFILE, &limit) == 0);
    pair(SOCK_STREAM, 10, 11);
    for (int i = 0; i < MANY; i += 100) {
        int fds[100];
        for (int k = 0; k < 100; k++)
            EXPECT((fds[k] = eventfd(1 + i + k, 0)) >= 0);
        hand(10, "x", 100, fds);
    }
}

static void check_thousand(int role) {
    for (int i = 0; i < MANY; i += 100) {
        int fds[MOST];
        uint64_t count;
        EXPECT(take(11, 4096, "x", fds) == 100);
        for (int k = 0; k < 100; k++)
            EXPECT(read(fds[k], &count, 8) == 8 && count == (uint64_t)(1 + i + k) && close(fds[k]) == 0);
    }
}

/* Each of these only a process that holds it can open again. */
static void make_pidfd(void) {
    pair(SOCK_STREAM, 10, 11);
    hand_one(10, "pidfd", syscall(SYS_pidfd_open, getpid(), 0));
}

static void check_pidfd(int role) {
    EXPECT(syscall(SYS_pidfd_send_signal, take_one(11, "pidfd"), 0, NULL, 0) == 0);
}

static void make_own(void) {
    pair(SOCK_STREAM, 10, 11);
    hand_one(10, "own", open("/proc/self/status", O_RDONLY));
}

static void check_own(int role) {
    char text[8];
    EXPECT(read(take_one(11, "own"), text, 5) == 5 && memcmp(text, "Name:", 5) == 0);
}

static void make_owner(void) {
    pair(SOCK_STREAM, 10, 11);
    int ends[2];
    EXPECT(pipe(ends) == 0);
    EXPECT(fcntl(ends[0], F_SETOWN, getpid()) == 0);
    hand(10, "owner", 2, ends);
}

static void check_owner(int role) {
    int ends[2];
    EXPECT(take(11, 4096, "owner", ends) == 2);
    EXPECT(fcntl(ends[0], F_GETOWN) == getpid());
}

/* What cannot be saved is behind something else, in a socket that is under way. */
static void make_deep(void) {
    pair(SOCK_STREAM, 10, 11);
    int inner[2];
    EXPECT(socketpair(AF_UNIX, SOCK_STREAM, 0, inner) == 0);
    say(inner[0], "front");
    hand_one(inner[0], "path", open("/dev/ptmx", O_PATH));
    hand_one(inner[0], "own", open("/proc/self/status", O_RDONLY));
    hand(10, "inner", 2, inner);
}

static void check_deep(int role) {
    int inner[2], fd;
    EXPECT(take(11, 4096, "inner", inner) == 2);
    EXPECT(take(inner[1], 4096, "frontpath", &fd) == 1);
    EXPECT(take(inner[1], 4096, "own", &fd) == 1);
}

const struct scenario scenarios[] = {
    {"streams", make_streams, check_streams},
    {"messages", make_messages, check_messages},
    {"hidden", make_hidden, check_hidden},
    {"kinds", make_kinds, check_kinds},
    {"shared", make_shared, check_shared},
    {"nested", make_nested, check_nested},
    {"many", make_many, check_many},
    {"told", make_told, check_told},
    {"thousand", make_thousand, check_thousand},
    {"pidfd", make_pidfd, check_pidfd},
    {"own", make_own, check_own},
    {"owner", make_owner, check_owner},
    {"deep", make_deep, check_deep},
    {0},
};
