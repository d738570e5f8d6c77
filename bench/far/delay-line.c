/* A line between two network devices that holds up each packet for some time.
 *
 *   delay-line DEVICE DEVICE MICROSECONDS
 *
 * It makes the two devices (TAP), says "ready", and carries whole packets, also those that a
 * network card would have cut (offloads), until it is killed. Move the devices into their
 * namespaces then. What does not fit is dropped, as a router does. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { PACKETS = 8192, ROOM = 66 << 10 };

struct packet {
    int64_t due;
    ssize_t len;
    char *bytes;
};

/* What is on its way to one device: packets taken and given so far. */
struct way {
    int from, to;
    unsigned taken, given;
    struct packet packets[PACKETS];
};

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int device(const char *name) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (fd < 0) fail("/dev/net/tun");
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (ioctl(fd, TUNSETIFF, &request)) fail(name);
    if (ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)) fail("offloads");
    return fd;
}

static void take(struct way *way, int64_t delay) {
    static char dropped[ROOM];
    for (;;) {
        int full = way->taken - way->given == PACKETS;
        struct packet *packet = &way->packets[way->taken % PACKETS];
        if (!full && !packet->bytes && !(packet->bytes = malloc(ROOM))) fail("memory");
        ssize_t len = read(way->from, full ? dropped : packet->bytes, ROOM);
        if (len <= 0) return;
        if (full) continue;
        packet->len = len;
        packet->due = nanoseconds() + delay;
        way->taken++;
    }
}

/* Gives what is due; returns when the next is. */
static int64_t give(struct way *way, int64_t next) {
    while (way->taken != way->given) {
        struct packet *packet = &way->packets[way->given % PACKETS];
        if (packet->due > nanoseconds()) return packet->due < next ? packet->due : next;
        /* A device that takes no more drops it. */
        if (write(way->to, packet->bytes, packet->len) < 0 && errno == EINTR) continue;
        way->given++;
    }
    return next;
}

int main(int count, char **words) {
    static struct way ways[2];
    if (count != 4) return 2;
    int64_t delay = atoll(words[3]) * 1000;
    int fds[2] = {device(words[1]), device(words[2])};
    for (int i = 0; i < 2; i++) ways[i].from = fds[i], ways[i].to = fds[1 - i];
    prctl(PR_SET_TIMERSLACK, 1UL);
    puts("ready");
    fflush(stdout);
    for (;;) {
        int64_t next = INT64_MAX;
        for (int i = 0; i < 2; i++) next = give(&ways[i], next);
        struct pollfd polled[2] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}};
        int64_t left = next - nanoseconds();
        if (left < 0) left = 0;
        struct timespec limit = {left / 1000000000, left % 1000000000};
        ppoll(polled, 2, next == INT64_MAX ? NULL : &limit, NULL);
        for (int i = 0; i < 2; i++) take(&ways[i], delay);
    }
}
