// Two programs that exchange numbers over the network, each of which checks that what it gets is
// complete and in order. usage: wired KIND server|client ADDRESS PORT COUNT
// KIND  stream: both send all their numbers as fast as the connection takes them
//       half: the client sends all and says that it sends no more; then the server sends all
//       again: as stream; then the client connects once more, to the address that it remembers
//       close: the client sends all, closes the connection and goes on
//       backlog: the server accepts when it may read its first number, and the client writes no
//       sooner
//       datagram: the client asks by datagrams, again and again, and the server answers
// The file `go` has as many bytes as thousands of numbers may be read.
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 512 };
static uint64_t count;

static void fail(const char *what) {
    printf("%s: %s\n", what, strerror(errno));
    fflush(stdout);
    exit(3);
}

static void say(const char *what, uint64_t number) {
    printf("%s %llu\n", what, (unsigned long long)number);
    fflush(stdout);
}

static uint64_t allowed(void) {
    struct stat found;
    return stat("go", &found) ? 0 : (uint64_t)found.st_size * 1000;
}

static void wait_until_allowed(uint64_t number) {
    while (allowed() < number) usleep(2000);
}

static const int options[][3] = {
    {SOL_SOCKET, SO_KEEPALIVE, 1}, {IPPROTO_TCP, TCP_NODELAY, 1}, {IPPROTO_TCP, TCP_KEEPIDLE, 77}};

static void set_options(int fd) {
    for (int at = 0; at < 3; at++)
        if (setsockopt(fd, options[at][0], options[at][1], &options[at][2], sizeof(int))) fail("setsockopt");
}

static void check_options(int fd) {
    for (int at = 0; at < 3; at++) {
        int value = 0;
        socklen_t size = sizeof value;
        if (getsockopt(fd, options[at][0], options[at][1], &value, &size)) fail("getsockopt");
        if (value != options[at][2]) {
            say("wrong option", at);
            exit(4);
        }
    }
}

// Reads and writes until all numbers have come that are to come, and gone that are to go.
static void exchange(int fd, uint64_t to_get, uint64_t to_send) {
    static uint64_t in[PIECE], out[PIECE];
    uint64_t got = 0, sent = 0, told = 0;
    size_t have = 0, left = 0, from = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (got < to_get || sent < to_send || left) {
        if (!left && sent < to_send) {
            for (from = 0; left < PIECE && sent < to_send; left++) out[left] = ++sent;
            left *= 8;
        }
        int reads = got < to_get && got < allowed();
        struct pollfd wait = {fd, (reads ? POLLIN : 0) | (left ? POLLOUT : 0), 0};
        if (poll(&wait, 1, 5) < 0 && errno != EINTR) fail("poll");
        ssize_t size = left ? write(fd, (char *)out + from, left) : 0;
        if (size < 0 && errno != EAGAIN && errno != EINTR) fail("write");
        if (size > 0) from += size, left -= size;
        if (!reads) continue;
        size = read(fd, (char *)in + have, sizeof in - have);
        if (size < 0 && errno != EAGAIN && errno != EINTR) fail("read");
        if (size == 0) errno = 0, fail("it ended early");
        if (size > 0) have += size;
        size_t whole = have / 8;
        for (size_t at = 0; at < whole; at++)
            if (in[at] != ++got) {
                say("wrong number", in[at]), say("and not", got);
                exit(4);
            }
        memmove(in, in + whole, have -= whole * 8);
        if (got / 1000 > told) say("at", told = got / 1000);
    }
    fcntl(fd, F_SETFL, 0);
}

static void tell_addresses(int fd) {
    for (int which = 0; which < 2; which++) {
        struct sockaddr_storage at;
        socklen_t size = sizeof at;
        char host[64], port[16];
        if ((which ? getpeername : getsockname)(fd, (void *)&at, &size)) fail("names");
        getnameinfo((void *)&at, size, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
        printf("%s %s %s\n", which ? "peer" : "own", host, port);
    }
}

static void see_the_end(int fd) {
    char byte;
    if (read(fd, &byte, 1)) fail("it goes on");
    say("end", count);
}

static int bound(struct addrinfo *at) {
    int fd = socket(at->ai_family, at->ai_socktype, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (fd < 0 || bind(fd, at->ai_addr, at->ai_addrlen)) fail("bind");
    return fd;
}

static int accepted(int listener) {
    int fd = accept(listener, NULL, NULL);
    if (fd < 0) fail("accept");
    set_options(fd);
    return fd;
}

static int connected(struct addrinfo *to) {
    for (int tries = 0; tries < 2000; tries++) {
        int fd = socket(to->ai_family, to->ai_socktype, 0);
        set_options(fd);
        if (!connect(fd, to->ai_addr, to->ai_addrlen)) return fd;
        close(fd);
        usleep(5000);
    }
    fail("connect");
    return -1;
}

static void be_done(int signal) {
    (void)signal;
    _exit(7);
}

// For a moment longer than it takes: the client asks again where the last answer got lost.
static void answer_datagrams(int fd) {
    uint64_t number, last = 0;
    signal(SIGALRM, be_done);
    for (;;) {
        struct sockaddr_storage who;
        socklen_t size = sizeof who;
        if (recvfrom(fd, &number, 8, 0, (void *)&who, &size) != 8) continue;
        if (number != last && number != last + 1) say("wrong number", number), exit(4);
        if (number > last && number == count) say("well", count), alarm(1);
        last = number;
        sendto(fd, &number, 8, 0, (void *)&who, size);
        if (last % 10 == 0) say("at", last);
    }
}

static void ask_by_datagrams(int fd, struct addrinfo *to) {
    if (connect(fd, to->ai_addr, to->ai_addrlen)) fail("connect");
    for (uint64_t number = 1; number <= count; number++) {
        wait_until_allowed(number * 1000);
        for (uint64_t got = 0; got != number;) {
            struct pollfd wait = {fd, POLLIN, 0};
            if (send(fd, &number, 8, 0) != 8 && errno != ECONNREFUSED) fail("send");
            if (poll(&wait, 1, 50) > 0) recv(fd, &got, 8, MSG_DONTWAIT);
        }
        say("at", number);
    }
}

int main(int words, char **word) {
    if (words != 6) return 2;
    count = strtoull(word[5], NULL, 10) * 1000;
    int server = !strcmp(word[2], "server"), half = !strcmp(word[1], "half");
    struct addrinfo hints = {0}, *at;
    hints.ai_socktype = strcmp(word[1], "datagram") ? SOCK_STREAM : SOCK_DGRAM;
    if (getaddrinfo(word[3], word[4], &hints, &at)) return 2;
    if (hints.ai_socktype == SOCK_DGRAM) {
        count /= 1000;
        int fd = server ? bound(at) : socket(at->ai_family, SOCK_DGRAM, 0);
        say("ready", 0);
        server ? answer_datagrams(fd) : ask_by_datagrams(fd, at);
        say("well", count);
        return 7;
    }
    int fd = -1, listener = server ? bound(at) : -1;
    if (server) {
        if (listen(listener, 7)) fail("listen");
        if (!strcmp(word[1], "backlog")) say("listens", 0), wait_until_allowed(1000);
        fd = accepted(listener);
    } else {
        fd = connected(at);
    }
    say("ready", 0);
    if (!strcmp(word[1], "backlog")) wait_until_allowed(1000);
    if (!strcmp(word[1], "close")) {
        if (server) exchange(fd, count, 0), see_the_end(fd);
        else exchange(fd, 0, count), close(fd), say("closed", 0), wait_until_allowed(count);
        return 7;
    }
    if (half) {
        if (!server) exchange(fd, 0, count), shutdown(fd, SHUT_WR), say("shut", 0), exchange(fd, count, 0);
        else exchange(fd, count, 0), see_the_end(fd), exchange(fd, 0, count);
    } else {
        exchange(fd, count, count);
    }
    check_options(fd);
    if (!strcmp(word[1], "again")) {
        struct sockaddr_in to, *as = (void *)at->ai_addr;
        socklen_t size = sizeof to;
        int next = server ? accepted(listener) : connected(at);
        exchange(next, 1000, 1000);
        if (getpeername(next, (void *)&to, &size)) fail("getpeername");
        if (!server && (to.sin_addr.s_addr != as->sin_addr.s_addr || to.sin_port != as->sin_port)) fail("another name");
        fd = next;
    }
    // Of one that has ended nobody knows them.
    if (server || !half) tell_addresses(fd);
    if (!server || !half) shutdown(fd, SHUT_WR);
    say("well", count);
    return 7;
}
