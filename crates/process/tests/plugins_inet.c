/* TCP and UDP. */
#include "plugins_child.h"
#include <arpa/inet.h>
#include <linux/filter.h>
#include <linux/icmp.h>
#include <linux/icmpv6.h>
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

static void remember_name(int fd) {
    char name[16];
    sprintf(name, "name-%d", fd);
    int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    struct sockaddr_storage own = own_address(fd, 0);
    EXPECT(write(file, &own, sizeof own) == sizeof own);
    close(file);
}

static void expect_name(int fd) {
    char name[16];
    sprintf(name, "name-%d", fd);
    int file = open(name, O_RDONLY);
    struct sockaddr_storage own, now = own_address(fd, 0);
    EXPECT(read(file, &own, sizeof own) == sizeof own && memcmp(&own, &now, sizeof own) == 0);
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

static int option_of(int fd, int level, int name) {
    int value = -1;
    socklen_t length = sizeof value;
    EXPECT(getsockopt(fd, level, name, &value, &length) == 0);
    return value;
}

/* Of sockets 10 to 12, while they are the same. */
static int options[3][5];

static void read_options(int into[3][5]) {
    for (int i = 0; i < 3; i++) {
        into[i][0] = option_of(10 + i, SOL_SOCKET, SO_REUSEADDR);
        into[i][1] = option_of(10 + i, SOL_SOCKET, SO_RCVLOWAT);
        into[i][2] = option_of(10 + i, IPPROTO_TCP, TCP_WINDOW_CLAMP);
        into[i][3] = option_of(10 + i, IPPROTO_TCP, TCP_QUICKACK);
        into[i][4] = option_of(10 + i, SOL_SOCKET, SO_RCVBUF);
    }
}

static void expect_options(void) {
    int now[3][5];
    read_options(now);
    EXPECT(!options[0][1] || memcmp(now, options, sizeof now) == 0);
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
    read_options(options);
}

static void check_full(int role) {
    uint32_t words, word;
    expect_options();
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

/* A datagram waits behind the news that nobody takes what is sent to where it came from. */
static void make_undelivered(void) {
    int peer = socket(AF_INET, SOCK_DGRAM, 0);
    bind_loopback(peer, AF_INET);
    put(socket(AF_INET, SOCK_DGRAM, 0), 10);
    bind_loopback(10, AF_INET);
    struct sockaddr_storage there = own_address(peer, 0), here = own_address(10, 0);
    EXPECT(connect(10, (struct sockaddr *)&there, sizeof there) == 0);
    EXPECT(sendto(peer, "x", 1, 0, (struct sockaddr *)&here, sizeof here) == 1);
    EXPECT(close(peer) == 0);
    say(10, "to nobody");
}

static void check_undelivered(int role) {
    char byte;
    EXPECT(recv(10, &byte, 1, MSG_DONTWAIT) == -1 && errno == ECONNREFUSED);
    EXPECT(recv(10, &byte, 1, MSG_DONTWAIT) == 1 && byte == 'x');
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

static int error_of(ssize_t result) {
    return result == -1 ? errno : 0;
}

static void pair_at(int client, int server) {
    connect_to(client, 10);
    put(accept(10, NULL, NULL), server);
}

/* The address that it had at its other end, whether it still has one or not. */
static struct sockaddr_in had_peer(int fd) {
    struct sockaddr_in address = {0};
    socklen_t length = sizeof address;
    EXPECT(getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &address, &length) == 0);
    return address;
}

static void reset_by_peer(int fd) {
    struct linger at_once = {1, 0};
    connect_to(fd, 10);
    int other = accept(10, NULL, NULL);
    EXPECT(setsockopt(other, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    EXPECT(close(other) == 0);
}

static void make_ended(void) {
    char byte;
    signal(SIGPIPE, SIG_IGN);
    listen_at(10, AF_INET);
    pair_at(11, 12);
    say(12, "last words");
    EXPECT(shutdown(11, SHUT_WR) == 0 && shutdown(12, SHUT_WR) == 0);
    struct sockaddr_in had = had_peer(11);
    int file = open("had", O_WRONLY | O_CREAT, 0600);
    EXPECT(write(file, &had, sizeof had) == sizeof had && close(file) == 0);
    reset_by_peer(13);
    reset_by_peer(14);
    EXPECT(error_of(read(14, &byte, 1)) == ECONNRESET);
    pair_at(15, 16);
    EXPECT(shutdown(15, SHUT_RD) == 0);
    put(socket(AF_INET, SOCK_DGRAM, 0), 17);
    struct sockaddr_storage address = own_address(10, 0);
    EXPECT(connect(17, (struct sockaddr *)&address, sizeof address) == 0);
    EXPECT(shutdown(17, SHUT_WR) == 0);
    put(socket(AF_INET, SOCK_STREAM, 0), 18);
}

static void check_ended(int role) {
    char byte;
    signal(SIGPIPE, SIG_IGN);
    EXPECT(error_of(write(11, "x", 1)) == EPIPE && error_of(write(12, "x", 1)) == EPIPE);
    expect_text(11, "last words");
    expect_end(11);
    expect_end(12);
    struct sockaddr_in had, now = had_peer(11);
    int file = open("had", O_RDONLY);
    EXPECT(read(file, &had, sizeof had) == sizeof had && memcmp(&had, &now, sizeof had) == 0);
    EXPECT(error_of(read(13, &byte, 1)) == ECONNRESET && error_of(write(13, "x", 1)) == EPIPE);
    expect_end(14);
    EXPECT(error_of(write(14, "x", 1)) == EPIPE);
    expect_end(15);
    say(15, "still");
    expect_text(16, "still");
    EXPECT(error_of(write(17, "x", 1)) == EPIPE);
    EXPECT(error_of(read(18, &byte, 1)) == ENOTCONN);
}

/* Who listens has no room for another one yet. */
static void make_connecting(void) {
    put(socket(AF_INET, SOCK_STREAM, 0), 10);
    bind_loopback(10, AF_INET);
    EXPECT(listen(10, 0) == 0);
    connect_to(11, 10);
    put(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), 12);
    struct sockaddr_storage address = own_address(10, 0);
    EXPECT(connect(12, (struct sockaddr *)&address, sizeof address) == -1 && errno == EINPROGRESS);
}

static void check_connecting(int role) {
    struct pollfd ready = {12, POLLOUT, 0};
    EXPECT(poll(&ready, 1, 0) == 0);
    put(accept(10, NULL, NULL), 13);
    EXPECT(poll(&ready, 1, 10000) == 1 && option_of(12, SOL_SOCKET, SO_ERROR) == 0);
    put(accept(10, NULL, NULL), 14);
    EXPECT(fcntl(12, F_GETFL) & O_NONBLOCK);
    say(12, "at last");
    expect_text(14, "at last");
}

static void listen_shared(int fd, struct sockaddr_storage *address) {
    int one = 1;
    put(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), fd);
    EXPECT(setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &one, sizeof one) == 0);
    EXPECT(bind(fd, (struct sockaddr *)address, sizeof *address) == 0 && listen(fd, 5) == 0);
}

static void make_listeners(void) {
    int zero = 0;
    listen_at(10, AF_INET);
    /* Two who are gone before they are accepted. */
    for (int i = 0; i < 2; i++) {
        connect_to(11, 10);
        EXPECT(close(11) == 0);
    }
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    struct sockaddr_storage address;
    memset(&address, 0, sizeof address);
    memcpy(&address, &any, sizeof any);
    listen_shared(12, &address);
    address = own_address(12, 0);
    listen_shared(13, &address);
    EXPECT(setsockopt(12, SOL_SOCKET, SO_REUSEPORT, &zero, sizeof zero) == 0);
    connect_to(14, 12);
}

static void check_listeners(int role) {
    for (int i = 0; i < 2; i++) {
        put(accept(10, NULL, NULL), 20);
        expect_end(20);
    }
    EXPECT(option_of(12, SOL_SOCKET, SO_REUSEPORT) == 0);
    EXPECT(option_of(13, SOL_SOCKET, SO_REUSEPORT) == 1);
    struct pollfd both[2] = {{12, POLLIN, 0}, {13, POLLIN, 0}};
    EXPECT(poll(both, 2, 5000) == 1);
    put(accept(both[0].revents ? 12 : 13, NULL, NULL), 21);
    say(14, "shared");
    expect_text(21, "shared");
}

/* Lets nothing pass. */
static struct sock_filter nothing[] = {{BPF_RET | BPF_K, 0, 0, 0}, {BPF_RET | BPF_K, 0, 0, 1}};

static void make_options(void) {
    int one = 1, none = 0;
    make_udp();
    struct sock_fprog program = {2, nothing};
    EXPECT(setsockopt(10, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) == 0);
    put(socket(AF_INET6, SOCK_DGRAM, 0), 13);
    struct sockaddr_in6 six = {.sin6_family = AF_INET6};
    EXPECT(inet_pton(AF_INET6, "2001:db8::ff00:42:8329", &six.sin6_addr) == 1);
    EXPECT(setsockopt(13, SOL_IP, IP_FREEBIND, &one, sizeof one) == 0);
    EXPECT(bind(13, (struct sockaddr *)&six, sizeof six) == 0);
    EXPECT(setsockopt(13, SOL_IP, IP_FREEBIND, &none, sizeof none) == 0);
    remember_name(13);
    put(socket(AF_INET, SOCK_STREAM, 0), 14);
    EXPECT(setsockopt(14, SOL_SOCKET, 72 /* SO_BUF_LOCK */, &one, sizeof one) == 0);
    EXPECT(setsockopt(11, SOL_SOCKET, SO_NO_CHECK, &one, sizeof one) == 0);
}

static void check_options(int role) {
    struct sock_filter found[2];
    socklen_t length = 2;
    EXPECT(getsockopt(10, SOL_SOCKET, SO_GET_FILTER, found, &length) == 0 && length == 2);
    EXPECT(memcmp(found, nothing, sizeof found) == 0);
    say(11, "kept out");
    check_udp(role);
    expect_name(13);
    EXPECT(option_of(13, SOL_IP, IP_FREEBIND) == 0);
    EXPECT(option_of(14, SOL_SOCKET, 72) == 1);
    EXPECT(option_of(11, SOL_SOCKET, SO_NO_CHECK) == 1);
}

/* It has written, and nobody has accepted it. */
static void make_unaccepted(void) {
    listen_at(10, AF_INET);
    connect_to(11, 10);
    say(11, "unheard");
}

static void make_unaccepted_gone(void) {
    make_unaccepted();
    EXPECT(close(11) == 0);
}

static void check_unaccepted(int role) {
    put(accept(10, NULL, NULL), 12);
    expect_text(12, "unheard");
}

/* Sends an echo request to this host, and receives the answer to it. */
static void echo(int fd, int raw, int sequence) {
    struct icmphdr request = {.type = ICMP_ECHO, .un.echo = {htons(7), htons(sequence)}};
    uint32_t sum = ICMP_ECHO + htons(7) + htons(sequence);
    request.checksum = ~(uint16_t)(sum + (sum >> 16));
    EXPECT(send(fd, &request, sizeof request, 0) == sizeof request);
    char packet[256];
    struct icmphdr *answer = (void *)(packet + (raw ? 20 : 0));
    do {
        EXPECT(recv(fd, packet, sizeof packet, 0) >= (raw ? 28 : 8));
    } while (answer->type != ICMP_ECHOREPLY || answer->un.echo.sequence != htons(sequence));
}

static struct sockaddr_in loopback(int last) {
    return (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK + last)};
}

static void make_raw(void) {
    struct sockaddr_in own = loopback(4), other = loopback(5);
    struct icmp_filter requests = {1 << ICMP_ECHO};
    struct icmp6_filter none = {{~0u, ~0u, ~0u, 0x7fffffff, ~0u, ~0u, ~0u, ~0u}};
    put(socket(AF_INET, SOCK_RAW, IPPROTO_ICMP), 10);
    EXPECT(setsockopt(10, SOL_RAW, ICMP_FILTER, &requests, sizeof requests) == 0);
    EXPECT(bind(10, (void *)&own, sizeof own) == 0);
    EXPECT(connect(10, (void *)&other, sizeof other) == 0);
    int on = 1, ttl = 33;
    put(socket(AF_INET, SOCK_RAW, 253), 11);
    EXPECT(setsockopt(11, IPPROTO_IP, IP_HDRINCL, &on, sizeof on) == 0);
    EXPECT(setsockopt(11, IPPROTO_IP, IP_TTL, &ttl, sizeof ttl) == 0);
    put(socket(AF_INET6, SOCK_RAW, IPPROTO_ICMPV6), 12);
    EXPECT(setsockopt(12, IPPROTO_ICMPV6, ICMPV6_FILTER, &none, sizeof none) == 0);
    echo(10, 1, 1);
}

static void check_raw(int role) {
    struct sockaddr_in own = loopback(4), other = loopback(5), found;
    struct icmp_filter requests = {0};
    struct icmp6_filter none;
    socklen_t length = sizeof found;
    EXPECT(getsockname(10, (void *)&found, &length) == 0);
    EXPECT(found.sin_addr.s_addr == own.sin_addr.s_addr);
    length = sizeof requests;
    EXPECT(getsockopt(10, SOL_RAW, ICMP_FILTER, &requests, &length) == 0);
    EXPECT(requests.data == 1 << ICMP_ECHO);
    echo(10, 1, 2);
    /* It hears nobody but whom it is connected to. */
    struct icmphdr request = {.type = ICMP_ECHO, .checksum = (uint16_t)~ICMP_ECHO};
    int by = socket(AF_INET, SOCK_RAW, IPPROTO_ICMP);
    char byte;
    EXPECT(sendto(by, &request, sizeof request, 0, (void *)&own, sizeof own) == sizeof request);
    EXPECT(recv(10, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
    EXPECT(connect(by, (void *)&other, sizeof other) == 0);
    EXPECT(option_of(11, IPPROTO_IP, IP_HDRINCL) == 1 && option_of(11, IPPROTO_IP, IP_TTL) == 33);
    EXPECT(option_of(11, SOL_SOCKET, SO_PROTOCOL) == 253);
    length = sizeof none;
    EXPECT(getsockopt(12, IPPROTO_ICMPV6, ICMPV6_FILTER, &none, &length) == 0);
    EXPECT(length == 32 && none.data[0] == ~0u && none.data[3] == 0x7fffffff);
}

static void make_ping(void) {
    struct sockaddr_in own = loopback(0), other = loopback(5);
    own.sin_port = htons(4711);
    put(socket(AF_INET, SOCK_DGRAM, IPPROTO_ICMP), 10);
    EXPECT(bind(10, (void *)&own, sizeof own) == 0);
    EXPECT(connect(10, (void *)&other, sizeof other) == 0);
    echo(10, 0, 1);
}

static void check_ping(int role) {
    struct sockaddr_in found;
    socklen_t length = sizeof found;
    EXPECT(getsockname(10, (void *)&found, &length) == 0);
    EXPECT(found.sin_addr.s_addr == htonl(INADDR_LOOPBACK) && found.sin_port == htons(4711));
    echo(10, 0, 2);
}

static void make_waiting(void) {
    make_raw();
    int by = socket(AF_INET, SOCK_RAW, 253);
    struct sockaddr_in any = loopback(0);
    EXPECT(sendto(by, "x", 1, 0, (void *)&any, sizeof any) == 1 && close(by) == 0);
}

const struct scenario scenarios[] = {
    {"raw", make_raw, check_raw},
    {"ping", make_ping, check_ping},
    {"waiting", make_waiting, check_raw},
    {"four", make_four, check_connection},
    {"six", make_six, check_connection},
    {"closed-first", make_closed_first, check_closed_first},
    {"full", make_full, check_full},
    {"udp", make_udp, check_udp},
    {"undelivered", make_undelivered, check_undelivered},
    {"outside", make_outside, check_outside},
    {"ended", make_ended, check_ended},
    {"connecting", make_connecting, check_connecting},
    {"listeners", make_listeners, check_listeners},
    {"options", make_options, check_options},
    {"unaccepted", make_unaccepted, check_unaccepted},
    {"unaccepted-gone", make_unaccepted_gone, check_unaccepted},
    {0},
};
