// Hands temporary files on to itself: makes some, closes them and keeps no more than their names,
// as programs do that have a compiler read what they wrote. Says a nonce, and does a step for each
// byte of the file GO: the first makes another such file, by a name that it has had from its
// beginning, the second reads and removes them all. Ends with 0. Usage: passing GO [MEBIBYTES]
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static unsigned nonce;

static int lost(const char *what, const char *path)
{
    printf("lost: %s %s: %m\n", what, path);
    fflush(stdout);
    exit(1);
}

static void put(int fd, const char *path)
{
    char text[16];
    int length = snprintf(text, sizeof text, "%08x", nonce);
    if (fd < 0 || write(fd, text, length) != length || close(fd)) lost("make", path);
}

// A name that is nowhere but in the heap.
static char *name(const char *end)
{
    char *path = malloc(64);
    snprintf(path, 64, "/tmp/kedge-passing-%d-%s", (int)getpid(), end);
    return path;
}

static void inside(const char *folder, char path[64]) { snprintf(path, 64, "%s/inside", folder); }

static char *make_folder(void)
{
    char *folder = name("XXXXXX"), path[64];
    if (!mkdtemp(folder)) lost("make", folder);
    inside(folder, path);
    put(open(path, O_WRONLY | O_CREAT | O_EXCL, 0640), path);
    memset(path, 1, sizeof path);
    return folder;
}

static void take(const char *path)
{
    char text[16] = "", expected[16];
    snprintf(expected, sizeof expected, "%08x", nonce);
    int fd = open(path, O_RDONLY);
    if (fd < 0 || read(fd, text, sizeof text) != 8 || strcmp(text, expected)) lost("read", path);
    close(fd);
    if (unlink(path)) lost("remove", path);
}

static void wait_for(const char *go, int steps)
{
    struct stat stat_of;
    struct timespec moment = {0, 2000000};
    while (stat(go, &stat_of) || stat_of.st_size < steps) nanosleep(&moment, 0);
}

int main(int argc, char **argv)
{
    if (argc < 2) return 2;
    getrandom(&nonce, sizeof nonce, 0);
    size_t bytes = (size_t)(argc > 2 ? atoi(argv[2]) : 8) << 20;
    char *memory = malloc(bytes);
    for (size_t at = 0; at < bytes; at += 64) memory[at] = (char)(nonce >> at / 64 % 24) | 1;
    char *first = name("XXXXXX"), *second = name("second"), *folder = make_folder(), path[64];
    put(mkstemp(first), first);
    printf("nonce %08x\n", nonce);
    fflush(stdout);
    wait_for(argv[1], 1);
    put(open(second, O_WRONLY | O_CREAT | O_EXCL, 0600), second);
    printf("%08x 1\n", nonce);
    fflush(stdout);
    wait_for(argv[1], 2);
    inside(folder, path);
    take(first), take(second), take(path);
    struct stat stat_of;
    if (stat(folder, &stat_of) || (stat_of.st_mode & 07777) != 0700) lost("look at", folder);
    if (rmdir(folder)) lost("remove", folder);
    printf("%08x 2\n%08x well\n", nonce, nonce);
    return 0;
}
