/* Unix sockets. */
#include "plugins_child.h"
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>

static void pair(int type, int a, int b) {
    int ends[2];
    EXPECT(socketpair(AF_UNIX, type, 0, ends) == 0);
    put(ends[0], a);
    put(ends[1], b);
}

static socklen_t name(struct sockaddr_un *address, const char *text) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    size_t length = strlen(text);
    memcpy(address->sun_path, text, length);
    /* @ stands for the zero byte of an abstract name. */
    if (text[0] == '@') {
        address->sun_path[0] = 0;
        return offsetof(struct sockaddr_un, sun_path) + length;
    }
    return sizeof *address;
}

static void bind_to(int fd, const char *text) {
    struct sockaddr_un address;
    socklen_t length = name(&address, text);
    EXPECT(bind(fd, (struct sockaddr *)&address, length) == 0);
}

static void connect_to(int fd, const char *text) {
    struct sockaddr_un address;
    socklen_t length = name(&address, text);
    EXPECT(connect(fd, (struct sockaddr *)&address, length) == 0);
}

static void expect_name(int fd, int peer, const char *text) {
    struct sockaddr_un address = {0};
    socklen_t length = sizeof address;
    EXPECT((peer ? getpeername : getsockname)(fd, (struct sockaddr *)&address, &length) == 0);
    if (text[0] == '@')
        EXPECT(address.sun_path[0] == 0 && strncmp(address.sun_path + 1, text + 1, strlen(text) - 1) == 0);
    else
        EXPECT(strcmp(address.sun_path, text) == 0);
}

static void send_descriptor(int by, int fd) {
    char text = 'd', control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec vector = {&text, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
    EXPECT(sendmsg(by, &message, 0) == 1);
}

static int receive_descriptor(int by) {
    char text, control[CMSG_SPACE(sizeof(int))];
    struct iovec vector = {&text, 1};
    struct msghdr message = {.msg_iov = &vector, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    EXPECT(recvmsg(by, &message, 0) == 1 && text == 'd');
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    EXPECT(header && header->cmsg_type == SCM_RIGHTS);
    int fd;
    memcpy(&fd, CMSG_DATA(header), sizeof fd);
    return fd;
}

static void make_pairs(void) {
    pair(SOCK_STREAM, 10, 11);
    say(10, "to eleven");
    int ends[2];
    EXPECT(pipe(ends) == 0);
    put(ends[0], 12);
    put(ends[1], 13);
    send_descriptor(10, 13);
    say(10, "after it");
    say(11, "to ten");
    EXPECT(shutdown(11, SHUT_WR) == 0);
    struct timeval time = {.tv_sec = 7};
    EXPECT(setsockopt(10, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof time) == 0);
    EXPECT(fcntl(10, F_SETFL, O_NONBLOCK) == 0);
    pair(SOCK_DGRAM, 14, 15);
    say(14, "one");
    say(14, "second");
    say(15, "back");
    pair(SOCK_SEQPACKET, 16, 17);
    say(16, "packet");
    say(16, "another");
    /* The other end is gone, its words are not. */
    pair(SOCK_STREAM, 18, 19);
    say(19, "last words");
    EXPECT(close(19) == 0);
    put(socket(AF_UNIX, SOCK_STREAM, 0), 20);
}

static void expect_packet(int fd, const char *text) {
    char buffer[64];
    EXPECT(recv(fd, buffer, sizeof buffer, 0) == (ssize_t)strlen(text));
    EXPECT(memcmp(buffer, text, strlen(text)) == 0);
}

static void check_pairs(int role) {
    expect_text(11, "to eleven");
    int passed = receive_descriptor(11);
    say(passed, "through what was passed");
    expect_text(12, "through what was passed");
    expect_text(11, "after it");
    expect_text(10, "to ten");
    expect_end(10);
    say(10, "this way still");
    expect_text(11, "this way still");
    signal(SIGPIPE, SIG_IGN);
    EXPECT(write(11, "x", 1) == -1 && errno == EPIPE);
    struct timeval time;
    socklen_t length = sizeof time;
    EXPECT(getsockopt(10, SOL_SOCKET, SO_RCVTIMEO, &time, &length) == 0 && time.tv_sec == 7);
    EXPECT(fcntl(10, F_GETFL) & O_NONBLOCK);
    expect_packet(15, "one");
    expect_packet(15, "second");
    expect_packet(14, "back");
    say(14, "new");
    expect_packet(15, "new");
    expect_packet(17, "packet");
    expect_packet(17, "another");
    expect_text(18, "last words");
    expect_end(18);
    EVENTUALLY(write(18, "x", 1) == -1 && errno == EPIPE);
    bind_to(20, "fresh");
}

static void nothing(int fd) {
    EXPECT(send(fd, "", 0, 0) == 0);
}

/* Messages without data, which wait among others. */
static void make_empty(void) {
    pair(SOCK_DGRAM, 10, 11);
    say(10, "one");
    nothing(10);
    nothing(10);
    say(10, "two");
    nothing(10);
    pair(SOCK_DGRAM, 12, 13);
    nothing(12);
    say(12, "behind it");
    pair(SOCK_SEQPACKET, 14, 15);
    say(14, "one");
    nothing(14);
    say(14, "two");
    nothing(14);
    pair(SOCK_SEQPACKET, 16, 17);
    nothing(16);
    say(16, "behind it");
    EXPECT(shutdown(16, SHUT_WR) == 0);
}

static void check_empty(int role) {
    expect_packet(11, "one");
    expect_packet(11, "");
    expect_packet(11, "");
    expect_packet(11, "two");
    expect_packet(11, "");
    expect_packet(13, "");
    expect_packet(13, "behind it");
    expect_packet(15, "one");
    expect_packet(15, "");
    expect_packet(15, "two");
    expect_packet(15, "");
    expect_packet(17, "");
    expect_packet(17, "behind it");
    expect_end(17);
    char byte;
    for (int fd = 11; fd < 17; fd += 2)
        EXPECT(recv(fd, &byte, 1, MSG_DONTWAIT) == -1 && errno == EAGAIN);
}

static void make_server(void) {
    put(socket(AF_UNIX, SOCK_STREAM, 0), 10);
    bind_to(10, "server");
    EXPECT(chmod("server", 0700) == 0);
    EXPECT(listen(10, 5) == 0);
    put(socket(AF_UNIX, SOCK_STREAM, 0), 11);
    char text[64];
    sprintf(text, "@kedge-client-%d", getpid());
    bind_to(11, text);
    connect_to(11, "server");
    put(accept(10, NULL, NULL), 12);
    put(open("name", O_RDWR | O_CREAT, 0600), 30);
    say(30, text);
    say(11, "request");
    say(12, "answer");
    /* Nobody has accepted it yet. */
    put(socket(AF_UNIX, SOCK_STREAM, 0), 13);
    connect_to(13, "server");
    put(socket(AF_UNIX, SOCK_SEQPACKET, 0), 14);
    sprintf(text, "@kedge-abstract-%d", getpid());
    bind_to(14, text);
    EXPECT(listen(14, 5) == 0);
    fork_role(NULL);
}

static void check_server(int role) {
    if (role == 1)
        return;
    char text[64] = {0};
    EXPECT(pread(30, text, 63, 0) > 0);
    expect_text(12, "request");
    expect_text(11, "answer");
    expect_name(10, 0, "server");
    expect_name(12, 0, "server");
    expect_name(12, 1, text);
    expect_name(11, 0, text);
    expect_name(11, 1, "server");
    struct stat stat_;
    EXPECT(stat("server", &stat_) == 0 && (stat_.st_mode & 0777) == 0700);
    put(accept(10, NULL, NULL), 20);
    say(13, "at last");
    expect_text(20, "at last");
    put(socket(AF_UNIX, SOCK_STREAM, 0), 21);
    connect_to(21, "server");
    put(accept(10, NULL, NULL), 22);
    say(21, "new");
    expect_text(22, "new");
    struct sockaddr_un address;
    socklen_t length = sizeof address;
    EXPECT(getsockname(14, (struct sockaddr *)&address, &length) == 0);
    put(socket(AF_UNIX, SOCK_SEQPACKET, 0), 23);
    EXPECT(connect(23, (struct sockaddr *)&address, length) == 0);
}

static void make_datagrams(void) {
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 10);
    bind_to(10, "receiver");
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 11);
    bind_to(11, "sender");
    connect_to(11, "receiver");
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 12);
    connect_to(12, "receiver");
    say(11, "from the sender");
    say(12, "from nobody");
}

static void check_datagrams(int role) {
    char buffer[64];
    struct sockaddr_un from = {0};
    socklen_t length = sizeof from;
    EXPECT(recvfrom(10, buffer, 64, 0, (struct sockaddr *)&from, &length) == 15);
    EXPECT(strcmp(from.sun_path, "sender") == 0);
    expect_packet(10, "from nobody");
    EXPECT(sendto(10, "answer", 6, 0, (struct sockaddr *)&from, length) == 6);
    expect_packet(11, "answer");
    say(12, "again");
    expect_packet(10, "again");
}

/* The other end is held outside of the job. */
static void make_outside(void) {
    pair(SOCK_STREAM, 10, 11);
    say(11, "from outside");
    int parent = getpid();
    if (fork() == 0) {
        alarm(60);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == parent)
            pause();
        _exit(0);
    }
    EXPECT(close(11) == 0);
}

static void check_outside(int role) {
    expect_text(10, "from outside");
    expect_end(10);
}

static void come_and_go(void) {
    for (;;) {
        int one = socket(AF_INET, SOCK_STREAM, 0);
        usleep(1000);
        close(one);
    }
}

/* A child has a socket at most moments, and each time another one. */
static void make_restless(void) {
    fork_role(come_and_go);
}

static void make_vsock(void) {
    int fd = socket(AF_VSOCK, SOCK_STREAM, 0);
    put(fd < 0 ? socket(AF_UNIX, SOCK_STREAM, 0) : fd, 10);
}

static void check_vsock(int role) {
}

static struct sockaddr_nl name_of(int fd) {
    struct sockaddr_nl name = {0};
    socklen_t length = sizeof name;
    EXPECT(getsockname(fd, (void *)&name, &length) == 0);
    return name;
}

/* Asks for the loopback's link, and reads all of the answer. */
static void ask_for_links(int fd, uint32_t port) {
    struct {
        struct nlmsghdr header;
        struct ifinfomsg link;
    } request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST, 7, 0}, {.ifi_index = 1}};
    char answer[16384];
    EXPECT(send(fd, &request, sizeof request, 0) == sizeof request);
    ssize_t length = recv(fd, answer, sizeof answer, 0);
    struct nlmsghdr *header = (void *)answer;
    EXPECT(length > (ssize_t)sizeof *header && header->nlmsg_type == RTM_NEWLINK);
    EXPECT(header->nlmsg_seq == 7 && header->nlmsg_pid == port);
}

static void make_netlink(void) {
    int on = 1, beyond = 33;
    struct sockaddr_nl links = {AF_NETLINK, .nl_pid = 0x6b656467, .nl_groups = RTMGRP_LINK};
    put(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE), 10);
    EXPECT(bind(10, (void *)&links, sizeof links) == 0);
    EXPECT(setsockopt(10, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &beyond, sizeof beyond) == 0);
    EXPECT(setsockopt(10, SOL_NETLINK, NETLINK_EXT_ACK, &on, sizeof on) == 0);
    /* One that is bound by asking, and one that nobody has used. */
    put(socket(AF_NETLINK, SOCK_DGRAM, NETLINK_ROUTE), 11);
    ask_for_links(11, name_of(11).nl_pid ? name_of(11).nl_pid : getpid());
    put(socket(AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG), 12);
    put(open("port", O_RDWR | O_CREAT, 0600), 13);
    uint32_t port = name_of(11).nl_pid;
    EXPECT(write(13, &port, sizeof port) == sizeof port);
}

static void check_netlink(int role) {
    struct sockaddr_nl name = name_of(10);
    EXPECT(name.nl_pid == 0x6b656467 && name.nl_groups == RTMGRP_LINK);
    int on = 0;
    uint32_t groups[64] = {0}, port;
    socklen_t length = sizeof groups, size = sizeof on;
    EXPECT(getsockopt(10, SOL_NETLINK, NETLINK_LIST_MEMBERSHIPS, groups, &length) == 0);
    EXPECT(groups[0] == 1 && groups[1] == 1);
    EXPECT(getsockopt(10, SOL_NETLINK, NETLINK_EXT_ACK, &on, &size) == 0 && on == 1);
    EXPECT(pread(13, &port, sizeof port, 0) == sizeof port && name_of(11).nl_pid == port);
    ask_for_links(10, 0x6b656467);
    ask_for_links(11, port);
    EXPECT(name_of(12).nl_pid == 0);
    int type;
    EXPECT(getsockopt(11, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_DGRAM);
    EXPECT(getsockopt(12, SOL_SOCKET, SO_PROTOCOL, &type, &size) == 0 && type == NETLINK_SOCK_DIAG);
}

/* Has an answer that it never reads. */
static void make_unread(void) {
    put(socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE), 10);
    struct {
        struct nlmsghdr header;
        struct ifinfomsg link;
    } request = {{sizeof request, RTM_GETLINK, NLM_F_REQUEST, 7, 0}, {.ifi_index = 1}};
    EXPECT(send(10, &request, sizeof request, 0) == sizeof request);
}

static void check_unread(int role) {
}

/* Has joined a group of generic netlink: notices of its families. */
static void make_generic(void) {
    int notices = 16;
    put(socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC), 10);
    EXPECT(setsockopt(10, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &notices, sizeof notices) == 0);
}

/* Names that lead nowhere, or to others by now; only root is root elsewhere for a moment. */
static void make_ghosts(void) {
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 10);
    bind_to(10, "ghost");
    put(socket(AF_UNIX, SOCK_DGRAM, 0), 11);
    connect_to(11, "ghost");
    EXPECT(unlink("ghost") == 0);
    if (geteuid() == 0) {
        say(11, "early");
        put(open("ghost", O_RDWR | O_CREAT, 0600), 12);
        say(12, "a file");
    }
}

static void check_ghosts(int role) {
    char text[16];
    expect_name(10, 0, "ghost");
    if (geteuid() != 0)
        return;
    EXPECT(read(10, text, sizeof text) == 5 && memcmp(text, "early", 5) == 0);
    EXPECT(pread(12, text, sizeof text, 0) == 6 && memcmp(text, "a file", 6) == 0);
    say(11, "late");
    EXPECT(read(10, text, sizeof text) == 4 && memcmp(text, "late", 4) == 0);
}

static void make_owned(void) {
    put(socket(AF_UNIX, SOCK_STREAM, 0), 10);
    bind_to(10, "owned");
    EXPECT(chmod("owned", 0751) == 0);
    if (geteuid() == 0)
        EXPECT(chown(".", 1234, 1235) == 0 && chown("owned", 1234, 1235) == 0);
    EXPECT(listen(10, 5) == 0);
}

static void check_owned(int role) {
    struct stat stat;
    EXPECT(lstat("owned", &stat) == 0 && (stat.st_mode & 07777) == 0751);
    EXPECT(stat.st_uid == (geteuid() ? geteuid() : 1234));
    EXPECT(stat.st_gid == (geteuid() ? getegid() : 1235));
    put(socket(AF_UNIX, SOCK_STREAM, 0), 11);
    connect_to(11, "owned");
    put(accept(10, NULL, NULL), 12);
    say(11, "welcome");
    expect_text(12, "welcome");
}

static void make_unaccepted(void) {
    put(socket(AF_UNIX, SOCK_STREAM, 0), 10);
    bind_to(10, "unaccepted");
    EXPECT(listen(10, 5) == 0);
    put(socket(AF_UNIX, SOCK_STREAM, 0), 11);
    connect_to(11, "unaccepted");
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

const struct scenario scenarios[] = {
    {"ghosts", make_ghosts, check_ghosts},
    {"owned", make_owned, check_owned},
    {"unaccepted", make_unaccepted, check_unaccepted},
    {"unaccepted-gone", make_unaccepted_gone, check_unaccepted},
    {"pairs", make_pairs, check_pairs},
    {"server", make_server, check_server},
    {"datagrams", make_datagrams, check_datagrams},
    {"empty", make_empty, check_empty},
    {"outside", make_outside, check_outside},
    {"netlink", make_netlink, check_netlink},
    {"unread", make_unread, check_unread},
    {"generic", make_generic, check_unread},
    {"vsock", make_vsock, check_vsock},
    {"restless", make_restless, check_unread},
    {0},
};
