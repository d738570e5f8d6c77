/* kedge.h: checkpoints and moves that a program asks for itself. C99 and C++, Linux; this header is all there is.
 *
 *     #include <kedge.h>
 *
 *     switch (kedge_checkpoint(KEDGE_DURABLE)) {
 *     case KEDGE_GOES_ON:   break;                 // saved; this is the program that asked
 *     case KEDGE_RESTARTED: open_my_log_anew();    // this is the program as it was brought back
 *                           break;
 *     default: fprintf(stderr, "no checkpoint: %s\n", kedge_error());
 *     }
 *
 * Any thread may ask. The program stands still for some milliseconds, with all of its job's processes; so
 * nothing is to be prepared. One checkpoint of a job at a time: where several processes are to be saved
 * together, one of them asks. docs/checkpoint.md has more.
 *
 *     if (kedge_migrate("local:1") != KEDGE_MOVED)     // all that the job has on its devices goes there
 *         fprintf(stderr, "it stays where it is: %s\n", kedge_error());
 *
 * Other threads go on meanwhile, and stand still for some milliseconds at its end. docs/migrate.md has more.
 *
 * SPDX-License-Identifier: Apache-2.0 OR MIT
 */
#ifndef KEDGE_H
#define KEDGE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

/* What is waited for. */
#define KEDGE_CAPTURED 0 /* the program goes on; a failure from here on is in the job's log only */
#define KEDGE_DURABLE 1  /* the image is on the disk and counts */

/* What kedge_checkpoint() returns. */
#define KEDGE_GOES_ON 0   /* saved, and this is the program that asked */
#define KEDGE_RESTARTED 1 /* brought back from the image that it asked for */
#define KEDGE_FAILED (-1) /* no checkpoint: kedge_error() says why. Also wherever there is no kedge */

/* What kedge_migrate() returns, or KEDGE_FAILED. */
#define KEDGE_MOVED 0

#if defined(__cplusplus)
#define KEDGE_THREAD_ thread_local
extern "C++" {
#else
#define KEDGE_THREAD_ __thread
#endif

#if defined(__GNUC__)
#define KEDGE_UNUSED_ __attribute__((unused))
#else
#define KEDGE_UNUSED_
#endif

/* Longest message that the job sends; it says no more than that. */
#define KEDGE_MOST_ 65536

static KEDGE_UNUSED_ char *kedge_text_(void) {
    static KEDGE_THREAD_ char text[512];
    return text;
}

/* Why this thread's last kedge_checkpoint() or kedge_migrate() failed. */
static KEDGE_UNUSED_ const char *kedge_error(void) { return kedge_text_(); }

static KEDGE_UNUSED_ int kedge_fail_(const char *why) {
    snprintf(kedge_text_(), 512, "%s", why);
    return KEDGE_FAILED;
}

/* Whether the program was started by kedge: 1 or 0. */
static KEDGE_UNUSED_ int kedge_present(void) {
    const char *path = getenv("KEDGE_CONTROL");
    return path != NULL && *path != '\0';
}

static KEDGE_UNUSED_ int kedge_write_(int fd, const char *bytes, size_t left) {
    while (left > 0) {
        ssize_t n = send(fd, bytes, left, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return -1;
        bytes += n;
        left -= (size_t)n;
    }
    return 0;
}

/* Reads all of it: 1; 0 where the other end has gone; -1. */
static KEDGE_UNUSED_ int kedge_read_(int fd, char *bytes, size_t left) {
    while (left > 0) {
        ssize_t n = recv(fd, bytes, left, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0 || (n < 0 && errno == ECONNRESET)) return 0;
        if (n < 0) return -1;
        bytes += n;
        left -= (size_t)n;
    }
    return 1;
}

/* Connects to the job and asks: a descriptor, or -1. */
static KEDGE_UNUSED_ int kedge_ask_(const char *request) {
    struct sockaddr_un address;
    char by_folder[64];
    const char *path = getenv("KEDGE_CONTROL"), *name = path == NULL ? NULL : strrchr(path, '/');
    size_t length = strlen(request);
    unsigned char head[4];
    int fd, folder = -1;
    if (name == NULL) return -1;
    /* A path that is too long for an address is reached by its folder's descriptor. */
    if (strlen(path) >= sizeof(address.sun_path)) {
        char *where = (char *)calloc(1, (size_t)(name - path) + 1);
        if (where == NULL) return -1;
        memcpy(where, path, (size_t)(name - path));
        folder = open(where, O_RDONLY);
        free(where);
        if (folder < 0) return -1;
        fcntl(folder, F_SETFD, FD_CLOEXEC);
        snprintf(by_folder, sizeof(by_folder), "/proc/self/fd/%d%.32s", folder, name);
        path = by_folder;
    }
    memset(&address, 0, sizeof(address));
    address.sun_family = AF_UNIX;
    memcpy(address.sun_path, path, strlen(path));
    fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) != 0) {
        close(fd);
        fd = -1;
    }
    if (folder >= 0) close(folder);
    if (fd < 0) return -1;
    head[0] = (unsigned char)length;
    head[1] = (unsigned char)(length >> 8);
    head[2] = head[3] = 0;
    if (kedge_write_(fd, (const char *)head, 4) != 0 || kedge_write_(fd, request, length) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Reads a message, with a zero at its end: 1; 0 where the other end has gone; -1. */
static KEDGE_UNUSED_ int kedge_message_(int fd, char *text) {
    unsigned char head[4];
    uint32_t length;
    int got = kedge_read_(fd, (char *)head, 4);
    if (got != 1) return got;
    length = head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;
    if (length > KEDGE_MOST_) return -1;
    got = kedge_read_(fd, text, length);
    text[got == 1 ? length : 0] = '\0';
    return got;
}

static KEDGE_UNUSED_ int kedge_begins_(const char *text, const char *with) {
    return strncmp(text, with, strlen(with)) == 0;
}

/* Which life of the job this is, in `life`: 0, or -1 where nobody answers. */
static KEDGE_UNUSED_ int kedge_life_(char *life, size_t room, char *text) {
    const char *begin = "{\"life\":\"";
    char *end;
    int got, fd = kedge_ask_("{\"version\":1,\"ask\":\"life\"}");
    if (fd < 0) return -1;
    got = kedge_message_(fd, text);
    close(fd);
    if (got != 1 || !kedge_begins_(text, begin)) return -1;
    text += strlen(begin);
    end = strchr(text, '"');
    if (end == NULL || (size_t)(end - text) >= room) return -1;
    memcpy(life, text, (size_t)(end - text));
    life[end - text] = '\0';
    return 0;
}

/* Keeps the job's own words. */
static KEDGE_UNUSED_ int kedge_refused_(const char *text) {
    char why[400];
    size_t n = 0;
    const char *from = strstr(text, "\"message\":\"");
    if (from == NULL) return kedge_fail_("the job answers in a way that this header does not know");
    for (from += strlen("\"message\":\""); *from != '\0' && *from != '"' && n + 1 < sizeof(why); from++) {
        if (*from == '\\' && from[1] != '\0') from++;
        why[n++] = *from;
    }
    why[n] = '\0';
    return kedge_fail_(why);
}

/* The connection has gone: the job was restarted, or its supervisor has ended. */
static KEDGE_UNUSED_ int kedge_returned_(const char *before, char *text) {
    struct timespec pause = {0, 10 * 1000 * 1000};
    char now[64];
    int tries;
    for (tries = 0; tries < 1000; tries++) {
        if (kedge_life_(now, sizeof(now), text) == 0)
            return strcmp(before, now) != 0 ? KEDGE_RESTARTED
                                            : kedge_fail_("the job's supervisor has hung up: kedge logs may say why");
        nanosleep(&pause, NULL);
    }
    return kedge_fail_("the job's supervisor does not answer: it was killed, or another job has its name");
}

static KEDGE_UNUSED_ int kedge_wait_(int fd, int until, const char *before, char *text) {
    for (;;) {
        int got = kedge_message_(fd, text);
        if (got == 0) return kedge_returned_(before, text);
        if (got < 0) return kedge_fail_("the connection to the job has failed");
        if (kedge_begins_(text, "{\"progress\":{\"durable\":")) return KEDGE_GOES_ON;
        if (kedge_begins_(text, "{\"progress\":{\"captured\":")) {
            if (until == KEDGE_CAPTURED) return KEDGE_GOES_ON;
        } else {
            return kedge_refused_(text);
        }
    }
}

/* Saves the job that this process is of, and waits until that is captured or durable. */
static KEDGE_UNUSED_ int kedge_checkpoint(int until) {
    char life[64], *text;
    int fd, result;
    kedge_text_()[0] = '\0';
    if (!kedge_present()) return kedge_fail_("the program was not started by kedge");
    text = (char *)malloc(KEDGE_MOST_ + 1);
    if (text == NULL) return kedge_fail_("no memory");
    if (kedge_life_(life, sizeof(life), text) != 0) {
        free(text);
        return kedge_fail_("the job's supervisor does not answer: it has ended, or is of another version of kedge");
    }
    fd = kedge_ask_("{\"version\":1,\"ask\":{\"checkpoint\":{\"stop\":false}}}");
    result = fd < 0 ? kedge_fail_("the job's supervisor does not answer") : kedge_wait_(fd, until, life, text);
    if (fd >= 0) close(fd);
    free(text);
    return result;
}

/* Whether this can be said between quotes in JSON as it is. */
static KEDGE_UNUSED_ int kedge_is_plain_(const char *text) {
    for (; *text != '\0'; text++)
        if (*text < ' ' || *text > '~' || *text == '"' || *text == '\\') return 0;
    return 1;
}

static KEDGE_UNUSED_ int kedge_moves_(int fd, char *text) {
    for (;;) {
        int got = kedge_message_(fd, text);
        if (got == 0) return kedge_fail_("the job's supervisor has hung up: kedge logs may say what became of the move");
        if (got < 0) return kedge_fail_("the connection to the job has failed");
        if (kedge_begins_(text, "{\"moving\":{\"event\":\"done\"")) return KEDGE_MOVED;
        if (!kedge_begins_(text, "{\"moving\":")) return kedge_refused_(text);
    }
}

/* Moves all that the job has on its devices to others, as `kedge migrate --to` names them, and waits for that. */
static KEDGE_UNUSED_ int kedge_migrate(const char *to) {
    char request[1200], *text;
    int fd, result;
    kedge_text_()[0] = '\0';
    if (!kedge_present()) return kedge_fail_("the program was not started by kedge");
    if (to == NULL || !kedge_is_plain_(to) || strlen(to) > 1000)
        return kedge_fail_("no devices are named so: see kedge migrate --to");
    snprintf(request, sizeof(request), "{\"version\":1,\"ask\":{\"migrate\":{\"to\":\"%s\",\"max_pause_ms\":50,\"rounds\":8}}}", to);
    text = (char *)malloc(KEDGE_MOST_ + 1);
    if (text == NULL) return kedge_fail_("no memory");
    fd = kedge_ask_(request);
    result = fd < 0 ? kedge_fail_("the job's supervisor does not answer") : kedge_moves_(fd, text);
    if (fd >= 0) close(fd);
    free(text);
    return result;
}

#if defined(__cplusplus)
}
#endif

#endif
