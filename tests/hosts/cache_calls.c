/* The functions of kedge_cache.h, on FILE. */
#include <errno.h>
#include <fcntl.h>
#include <kedge_cache.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LENGTH 100000

static char bytes[LENGTH], found[LENGTH];

static void must(int well, const char *what)
{
    if (!well) {
        perror(what);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    must(argc == 2, "a file");
    int fd = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(fd >= 0, "open");
    for (int at = 0; at < LENGTH; at++)
        bytes[at] = (char)(at * 7);
    long long end = 0;
    for (int round = 0; round < 20; round++) {
        struct iovec parts[2] = {{bytes, 60000}, {bytes + 60000, LENGTH - 60000}};
        must(kedge_cache_write(fd, bytes, LENGTH) == LENGTH, "write");
        must(kedge_cache_writev(fd, parts, 2) == LENGTH, "writev");
        end += 2 * LENGTH;
        must(kedge_cache_pwrite(fd, bytes, LENGTH, end) == LENGTH, "pwrite");
        must(kedge_cache_pwritev(fd, parts, 2, end + LENGTH) == LENGTH, "pwritev");
        must(lseek(fd, 2 * LENGTH, SEEK_CUR) == end + 2 * LENGTH, "lseek");
        end += 2 * LENGTH;
    }
    must(lseek(fd, 0, SEEK_END) == end, "its end");
    for (long long at = 0; at < end; at += LENGTH)
        must(pread(fd, found, LENGTH, at) == LENGTH && !memcmp(found, bytes, LENGTH), "read");
    kedge_cache_forget(fd);
    must(kedge_cache_write(fd, bytes, LENGTH) == LENGTH, "write, forgotten");
    must(close(fd) == 0, "close");
    must(kedge_cache_write(fd, bytes, 1) == -1 && errno == EBADF, "closed");
    puts("ok");
    return 0;
}
