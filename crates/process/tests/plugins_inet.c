/* TCP and UDP. */
#include "plugins_child.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>

static struct sockaddr_storage own_address(int fd, int peer) {
    struct sockaddr_storage address;
    memset(&address, 0, sizeof address);
    socklen_t length = sizeof address;
    EXPECT((peer ? getpeername : getsockname)(fd, (struct sockaddr *)&address, &length) == 0);
    return address;
}

static void bind_loopback(int fd, int family) {
    struct sockaddr_in four = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    if (family == AF_INET)
        EXPECT(bind(fd, (struct sockaddr *)&four, sizeof four) == 0);
    else
        EXPECT(bind(fd, (struct sockaddr *)&six, sizeof six) == 0);
}

static void listen_at(int fd, int family) {
    put(socket(family, SOCK_STREAM, 0), fd);
    bind_loopback(fd, family);
    EXPECT(listen(fd, 17) == 0);
}

static void connect_to(int fd, int listener) {
    struct sockaddr_storage address = own_address(listener, 0);
    put(socket(address.ss_family, SOCK_STREAM, 0), fd);
    EXPECT(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
}

/* Addresses, as they were, are kept in a file. */
static void remember(int fd) {
    char name[16];
    sprintf(name, "address-%d", fd);
    int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    struct sockaddr_storage pair[2] = {own_address(fd, 0), own_address(fd, 1)};
    EXPECT(write(file, pair, sizeof pair) == sizeof pair);
    close(file);
}

static void expect_remembered(int fd) {
    char name[16];
    sprintf(name, "address-%d", fd);
    int file = open(name, O_RDONLY);
    struct sockaddr_storage pair[2], now[2] = {own_address(fd, 0), own_address(fd, 1)};
    EXPECT(read(file, pair, sizeof pair) == sizeof pair);
    EXPECT(memcmp(pair, now, sizeof pair) == 0);
    close(file);
}

static void make_connection(int family) {
    listen_at(10, family);
    connect_to(11, 10);
    put(accept(10, NULL, NULL), 12);
    say(11, "request");
    say(12, "answer");
    int one = 1;
    EXPECT(setsockopt(11, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) == 0);
    EXPECT(fcntl(12, F_SETFL, O_NONBLOCK) == 0);
    remember(11);
    remember(12);
    connect_to(13, 10);
    /* One way is finished. */
    connect_to(14, 10);
    int waiting = accept(10, NULL, NULL), finished = accept(10, NULL, NULL);
    EXPECT(close(13) == 0);
    EXPECT(close(waiting) == 0);
    put(finished, 15);
    say(14, "the end");
    EXPECT(shutdown(14, SHUT_WR) == 0);
    /* Nobody has accepted it yet. */
    connect_to(16, 10);
    put(socket(family, SOCK_STREAM, 0), 17);
    fork_role(NULL);
}

static void make_four(void) { make_connection(AF_INET); }
static void make_six(void) { make_connection(AF_INET6); }

static void check_connection(int role) {
    if (role == 1)
        return;
    expect_text(12, "request");
    expect_text(11, "answer");
    expect_remembered(11);
    expect_remembered(12);
    int value = 0;
    socklen_t length = sizeof value;
    EXPECT(getsockopt(11, IPPROTO_TCP, TCP_NODELAY, &value, &length) == 0 && value);
    EXPECT(fcntl(12, F_GETFL) & O_NONBLOCK);
    EXPECT(getsockopt(10, SOL_SOCKET, SO_REUSEADDR, &value, &length) == 0 && !value);
    expect_text(15, "the end");
    expect_end(15);
    say(15, "and back");
    expect_text(14, "and back");
    put(accept(10, NULL, NULL), 20);
    say(16, "at last");
    expect_text(20, "at last");
    connect_to(21, 10);
    put(accept(10, NULL, NULL), 22);
    say(22, "new");
    expect_text(21, "new");
    struct tcp_info info;
    length = sizeof info;
    EXPECT(getsockopt(10, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_sacked == 17);
}

/* The end that was accepted is closed first, so that it is the one that stays in TIME-WAIT. */
static void make_closed_first(void) {
    put(socket(AF_INET, SOCK_STREAM, 0), 20);
    bind_loopback(20, AF_INET);
    EXPECT(listen(20, 17) == 0);
    connect_to(30, 20);
    put(accept(20, NULL, NULL), 10);
    remember(10);
    say(30, "hello");
}

static void check_closed_first(int role) {
    expect_text(10, "hello");
    expect_remembered(10);
    connect_to(31, 20);
}

/* As much as the connection takes: the receiver's window is closed. */
static void make_full(void) {
    listen_at(10, AF_INET);
    connect_to(11, 10);
    put(accept(10, NULL, NULL), 12);
    EXPECT(fcntl(11, F_SETFL, O_NONBLOCK) == 0);
    uint32_t word = 0;
    put(open("words", O_RDWR | O_CREAT, 0600), 13);
    static uint32_t words[4096];
    for (;;) {
        for (int i = 0; i < 4096; i++)
            words[i] = word + i;
        ssize_t count = write(11, words, sizeof words);
        if (count < 0) {
            struct pollfd room = {11, POLLOUT, 0};
            if (poll(&room, 1, 50) == 1)
                continue;
            break;
        }
        EXPECT(count % 4 == 0);
        word += count / 4;
    }
    EXPECT(pwrite(13, &word, 4, 0) == 4);
}

static void check_full(int role) {
    uint32_t words, word;
    EXPECT(pread(13, &words, 4, 0) == 4 && words > 20000);
    FILE *stream = fdopen(dup(12), "r");
    for (uint32_t i = 0; i < words; i++)
        EXPECT(fread(&word, 4, 1, stream) == 1 && word == i);
    EXPECT(close(11) == 0);
    EXPECT(fread(&word, 4, 1, stream) == 0 && feof(stream));
}

static void make_udp(void) {
    put(socket(AF_INET, SOCK_DGRAM, 0), 10);
    bind_loopback(10, AF_INET);
    put(socket(AF_INET, SOCK_DGRAM, 0), 11);
    struct sockaddr_storage address = own_address(10, 0);
    EXPECT(connect(11, (struct sockaddr *)&address, sizeof address) == 0);
    say(11, "one");
    say(11, "second");
    put(socket(AF_INET6, SOCK_DGRAM, 0), 12);
    bind_loopback(12, AF_INET6);
}

static void check_udp(int role) {
    char buffer[64];
    struct sockaddr_storage from = {0}, sender = own_address(11, 0);
    socklen_t length = sizeof from;
    EXPECT(recvfrom(10, buffer, 64, MSG_DONTWAIT, (struct sockaddr *)&from, &length) == 3);
    EXPECT(memcmp(&from, &sender, sizeof from) == 0);
    EXPECT(recv(10, buffer, 64, MSG_DONTWAIT) == 6 && memcmp(buffer, "second", 6) == 0);
    EXPECT(sendto(10, "back", 4, 0, (struct sockaddr *)&from, length) == 4);
    EXPECT(recv(11, buffer, 64, 0) == 4);
    EXPECT(own_address(12, 0).ss_family == AF_INET6);
}

/* The other end is held outside of the job. */
static void make_outside(void) {
    listen_at(10, AF_INET);
    connect_to(11, 10);
    put(accept(10, NULL, NULL), 12);
    say(12, "from outside");
    int parent = getpid(), ready[2];
    char byte;
    EXPECT(pipe(ready) == 0);
    if (fork() == 0) {
        close(10);
        close(11);
        alarm(60);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(ready[0]);
        /* As long as it has the listening socket, nobody else can listen there. */
        if (write(ready[1], "", 1) != 1) _exit(1);
        close(ready[1]);
        while (getppid() == parent)
            pause();
        _exit(0);
    }
    EXPECT(read(ready[0], &byte, 1) == 1);
    EXPECT(close(ready[0]) == 0 && close(ready[1]) == 0);
    EXPECT(close(12) == 0);
}

static void check_outside(int role) {
    expect_text(11, "from outside");
    char byte;
    EXPECT(read(11, &byte, 1) == -1 && errno == ECONNRESET);
    connect_to(13, 10);
}

const struct scenario scenarios[] = {
    {"four", make_four, check_connection},
    {"six", make_six, check_connection},
    {"closed-first", make_closed_first, check_closed_first},
    {"full", make_full, check_full},
    {"udp", make_udp, check_udp},
    {"outside", make_outside, check_outside},
    {0},
};
