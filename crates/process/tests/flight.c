/* Fills everything that holds bytes, both ways; when the file "go" is there, reads all of it and
   compares. Says "ready", then "well" or "wrong" and where. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            printf("wrong: line %d: %s (errno %d)\n", __LINE__, #condition, errno);                \
            fflush(stdout);                                                                        \
            _exit(1);                                                                              \
        }                                                                                          \
    } while (0)

/* One direction: what was sent is the numbers from `first` on, `bytes` of them. */
struct way {
    int from, to;
    uint32_t first;
    size_t bytes;
    int message; /* 0: a stream; else each is so long */
};

#define ALL (1 << 30)

static struct way ways[64];
static int count;

static char byte_at(uint32_t first, size_t at) {
    uint32_t word = first + at / 4;
    return ((char *)&word)[at % 4];
}

/* As much as it takes, in pieces of an odd size; or so many messages or pieces. */
static void fill(int from, int to, int message, int most) {
    struct way *way = &ways[count];
    *way = (struct way){from, to, (uint32_t)count << 24, 0, message};
    count++;
    int flags = fcntl(from, F_GETFL);
    EXPECT(fcntl(from, F_SETFL, flags | O_NONBLOCK) == 0);
    for (int sent = 0; sent < most;) {
        char piece[1021];
        size_t length = message ? message : sizeof piece;
        for (size_t i = 0; i < length; i++)
            piece[i] = byte_at(way->first, way->bytes + i);
        ssize_t taken = write(from, piece, length);
        if (taken < 0) {
            EXPECT(errno == EAGAIN);
            struct pollfd room = {from, POLLOUT, 0};
            if (poll(&room, 1, 20) == 1)
                continue;
            break;
        }
        way->bytes += taken;
        sent++;
    }
    EXPECT(fcntl(from, F_SETFL, flags) == 0);
}

static void *drain(void *which) {
    struct way *way = which;
    size_t at = 0;
    while (at < way->bytes) {
        static __thread char piece[1 << 16];
        size_t left = way->bytes - at;
        ssize_t got = read(way->to, piece, left < sizeof piece ? left : sizeof piece);
        EXPECT(got > 0);
        EXPECT(!way->message || got == way->message);
        for (ssize_t i = 0; i < got; i++)
            EXPECT(piece[i] == byte_at(way->first, at + i));
        at += got;
    }
    struct pollfd more = {way->to, POLLIN, 0};
    EXPECT(poll(&more, 1, 10) == 0 || (more.revents & POLLHUP) ||
           recv(way->to, &more, 1, MSG_PEEK) == 0);
    return NULL;
}

static void tcp(int size) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int listener = socket(AF_INET, SOCK_STREAM, 0), a = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT(bind(listener, (void *)&at, sizeof at) == 0 && listen(listener, 1) == 0);
    EXPECT(getsockname(listener, (void *)&at, &length) == 0);
    EXPECT(connect(a, (void *)&at, sizeof at) == 0);
    int b = accept(listener, NULL, NULL);
    EXPECT(b >= 0 && close(listener) == 0);
    if (size) {
        EXPECT(setsockopt(b, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) == 0);
        EXPECT(setsockopt(b, SOL_SOCKET, SO_RCVBUF, &size, sizeof size) == 0);
    }
    /* A small buffer is slow to read: the kernel waits 40 ms before it tells of room. */
    fill(a, b, 0, size && size <= 20000 ? 60 : ALL);
    fill(b, a, 0, ALL);
    if (size == 20000)
        EXPECT(shutdown(a, SHUT_WR) == 0);
}

static int size_of(int fd) {
    int size, lock;
    socklen_t length = sizeof size;
    EXPECT(getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, &length) == 0);
    EXPECT(getsockopt(fd, SOL_SOCKET, 72 /* SO_BUF_LOCK */, &lock, &length) == 0);
    return lock & 2 ? size : 0;
}

static int option_of(int fd, int name) {
    int value = -2;
    socklen_t length = sizeof value;
    EXPECT(getsockopt(fd, SOL_SOCKET, name, &value, &length) == 0);
    return value;
}

static void pair(int kind, int message) {
    int ends[2];
    EXPECT(socketpair(AF_UNIX, kind, 0, ends) == 0);
    fill(ends[0], ends[1], message, message ? 5 : ALL);
    fill(ends[1], ends[0], message, message ? 5 : ALL);
}

static void udp(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    int a = socket(AF_INET, SOCK_DGRAM, 0), b = socket(AF_INET, SOCK_DGRAM, 0);
    EXPECT(bind(b, (void *)&at, sizeof at) == 0 && getsockname(b, (void *)&at, &length) == 0);
    EXPECT(connect(a, (void *)&at, sizeof at) == 0);
    fill(a, b, 700, 5);
}

static int master, slave;
static mqd_t queue;

static void terminal(void) {
    master = posix_openpt(O_RDWR | O_NOCTTY);
    EXPECT(master >= 0 && grantpt(master) == 0 && unlockpt(master) == 0);
    slave = open(ptsname(master), O_RDWR | O_NOCTTY);
    struct termios settings;
    EXPECT(slave >= 0 && tcgetattr(slave, &settings) == 0);
    settings.c_lflag &= ~ECHO;
    settings.c_oflag &= ~OPOST;
    EXPECT(tcsetattr(slave, TCSANOW, &settings) == 0);
    for (int i = 0; i < 100; i++) {
        EXPECT(dprintf(slave, "out %04d\n", i) == 9);
        EXPECT(dprintf(master, "in %04d\n", i) == 8);
    }
    usleep(20000);
}

static void check_terminal(void) {
    char text[16] = {0};
    for (int i = 0; i < 100; i++) {
        char wanted[16];
        for (int at = 0; at < 9;) {
            ssize_t got = read(master, text + at, 9 - at);
            EXPECT(got > 0);
            at += got;
        }
        sprintf(wanted, "out %04d\n", i);
        EXPECT(memcmp(text, wanted, 9) == 0);
        sprintf(wanted, "in %04d\n", i);
        EXPECT(read(slave, text, sizeof text) == 8 && memcmp(text, wanted, 8) == 0);
    }
    struct termios settings;
    EXPECT(tcgetattr(slave, &settings) == 0);
    EXPECT((settings.c_lflag & ICANON) && (settings.c_iflag & ICRNL));
    EXPECT(!(settings.c_lflag & ECHO) && !(settings.c_oflag & OPOST));
}

static void messages(void) {
    char name[64];
    sprintf(name, "/kedge-flight-%d-%ld", getpid(), random());
    struct mq_attr limits = {.mq_maxmsg = 4, .mq_msgsize = 100};
    queue = mq_open(name, O_RDWR | O_CREAT | O_EXCL, 0600, &limits);
    EXPECT(queue >= 0 && mq_unlink(name) == 0);
    EXPECT(mq_send(queue, "low", 3, 1) == 0 && mq_send(queue, "first", 5, 7) == 0);
    EXPECT(mq_send(queue, "second", 6, 7) == 0 && mq_send(queue, "", 0, 0) == 0);
}

static void check_messages(void) {
    const char *wanted[] = {"first", "second", "low", ""};
    for (int i = 0; i < 4; i++) {
        char text[101] = {0};
        EXPECT(mq_receive(queue, text, 100, NULL) == (ssize_t)strlen(wanted[i]));
        EXPECT(strcmp(text, wanted[i]) == 0);
    }
}

/* Pipes that no process holds: both ends are under way, a number is in each. */
enum { PASSED = 20 };
static int carriers[2][2];

static void descriptors(void) {
    for (int kind = 0; kind < 2; kind++) {
        EXPECT(socketpair(AF_UNIX, kind ? SOCK_DGRAM : SOCK_STREAM, 0, carriers[kind]) == 0);
        for (int i = 0; i < (kind ? 5 : PASSED); i++) {
            int ends[2];
            EXPECT(pipe(ends) == 0 && write(ends[1], &i, sizeof i) == sizeof i);
            char control[CMSG_SPACE(sizeof ends)] = {0};
            struct iovec data = {"pipe", 4};
            struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
            struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            *header = (struct cmsghdr){CMSG_LEN(sizeof ends), SOL_SOCKET, SCM_RIGHTS};
            memcpy(CMSG_DATA(header), ends, sizeof ends);
            EXPECT(write(carriers[kind][0], "text", 4) == 4);
            EXPECT(sendmsg(carriers[kind][0], &message, 0) == 4);
            EXPECT(close(ends[0]) == 0 && close(ends[1]) == 0);
        }
    }
}

static void check_descriptors(void) {
    for (int kind = 0; kind < 2; kind++)
        for (int i = 0; i < (kind ? 5 : PASSED); i++) {
            int ends[2], number;
            char text[4], control[CMSG_SPACE(sizeof ends)];
            struct iovec data = {text, 4};
            struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
            EXPECT(recvmsg(carriers[kind][1], &message, 0) == 4 && memcmp(text, "text", 4) == 0);
            EXPECT(message.msg_controllen == 0);
            message.msg_controllen = sizeof control;
            EXPECT(recvmsg(carriers[kind][1], &message, 0) == 4 && memcmp(text, "pipe", 4) == 0);
            struct cmsghdr *header = CMSG_FIRSTHDR(&message);
            EXPECT(header && header->cmsg_len == CMSG_LEN(sizeof ends));
            memcpy(ends, CMSG_DATA(header), sizeof ends);
            EXPECT(close(ends[1]) == 0 && read(ends[0], &number, sizeof number) == sizeof number);
            EXPECT(number == i && read(ends[0], &number, 1) == 0 && close(ends[0]) == 0);
        }
}

int main(void) {
    const int given[] = {0, 4096, 20000, 200000};
    for (int i = 0; i < 4; i++)
        tcp(given[i]);
    int connections = count, before[64];
    for (int i = 0; i < connections; i++)
        before[i] = size_of(ways[i].to);
    pair(SOCK_STREAM, 0);
    pair(SOCK_DGRAM, 300);
    pair(SOCK_SEQPACKET, 200);
    udp();
    int ends[2];
    EXPECT(pipe(ends) == 0);
    fill(ends[1], ends[0], 0, ALL);
    terminal();
    messages();
    descriptors();
    printf("ready\n");
    fflush(stdout);
    while (access("go", F_OK) != 0)
        poll(NULL, 0, 5);
    for (int i = 0; i < connections; i++) {
        EXPECT(size_of(ways[i].to) == before[i]);
        EXPECT(option_of(ways[i].to, SO_RCVLOWAT) == 1);
    }
    for (int i = connections; i < count - 1; i++)
        EXPECT(option_of(ways[i].to, SO_PEEK_OFF) == -1);
    pthread_t threads[64];
    for (int i = 0; i < count; i++)
        EXPECT(pthread_create(&threads[i], NULL, drain, &ways[i]) == 0);
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    check_terminal();
    check_messages();
    check_descriptors();
    printf("well\n");
    return 0;
}
