/* What the scenarios share. Each file has a table of them. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Ends the program, and says where, unless the condition holds. */
#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #condition, errno);      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* The same within seconds: the tests around this one may hold a copy of the other end a moment
   longer, between fork and exec. */
#define EVENTUALLY(condition)                                                                      \
    do {                                                                                           \
        for (int tries = 0; tries < 5000 && !(condition); tries++)                                 \
            usleep(1000);                                                                          \
        EXPECT(condition);                                                                         \
    } while (0)

struct scenario {
    const char *name;
    void (*make)(void);
    /* In process `role`: 0 is the first. */
    void (*check)(int role);
};

extern const struct scenario scenarios[];

static int others[16], other_count;

/* Makes process `role` (1, 2, …), which only waits: what it runs is `in`. */
static __attribute__((unused)) void fork_role(void (*in)(void)) {
    int made = fork();
    EXPECT(made >= 0);
    if (made == 0) {
        alarm(60);
        if (in)
            in();
        for (;;)
            pause();
    }
    others[other_count++] = made;
}

/* Puts `fd` under the number `as`, which the checking half knows. */
static __attribute__((unused)) void put(int fd, int as) {
    EXPECT(fd >= 0);
    if (fd == as)
        return;
    EXPECT(dup2(fd, as) == as);
    EXPECT(close(fd) == 0);
}

/* Reads exactly this text. */
static __attribute__((unused)) void expect_text(int fd, const char *text) {
    char buffer[4096];
    size_t length = strlen(text), have = 0;
    while (have < length) {
        ssize_t count = read(fd, buffer + have, length - have);
        EXPECT(count > 0);
        have += count;
    }
    EXPECT(memcmp(buffer, text, length) == 0);
}

static __attribute__((unused)) void expect_end(int fd) {
    char byte;
    EXPECT(read(fd, &byte, 1) == 0);
}

static __attribute__((unused)) void say(int fd, const char *text) {
    EXPECT(write(fd, text, strlen(text)) == (ssize_t)strlen(text));
}

/* SIGUSR1 asks the making half to check for itself: what it has must not have been disturbed. */
static volatile sig_atomic_t asked;

static void ask(int signal) {
    asked = 1;
}

int main(int count, char **arguments) {
    EXPECT(count >= 4);
    alarm(60);
    EXPECT(chdir(arguments[3]) == 0);
    for (const struct scenario *each = scenarios; each->name; each++) {
        if (strcmp(each->name, arguments[2]) != 0)
            continue;
        if (strcmp(arguments[1], "check") == 0) {
            each->check(count > 4 ? atoi(arguments[4]) : 0);
            say(1, "well\n");
            return 0;
        }
        signal(SIGUSR1, ask);
        each->make();
        char line[256] = "ready";
        for (int i = 0; i < other_count; i++)
            sprintf(line + strlen(line), " %d", others[i]);
        strcat(line, "\n");
        say(1, line);
        while (!asked)
            poll(NULL, 0, 10);
        each->check(0);
        say(1, "well\n");
        return 0;
    }
    EXPECT(!"a known scenario");
}
