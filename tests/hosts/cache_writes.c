/* What write, pwrite and their like leave in a file, in all the ways that programs mix them. Prints what each call
 * returned, so that two file systems can be compared.
 *
 *   cache_writes mix FILE SEED COUNT     calls at random, all of one process
 *   cache_writes share FILE WRITERS      threads, and half of them in a child, write records by one descriptor
 *   cache_writes limit FILE              as far as RLIMIT_FSIZE, and beyond
 *   cache_writes blocks FILE COUNT NANOSECONDS   blocks; the number of each is printed once it is written
 *   cache_writes odd FILE                what is seldom: bad memory, own descriptors closed, numbers taken
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define LARGEST (1 << 18)
#define RECORD 1000
#define RECORDS 2000
#define BLOCK 4096

static uint64_t state;
static unsigned char bytes[2 * LARGEST], other[2 * LARGEST];

static uint64_t draw(uint64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state % below;
}

static void must(int well, const char *what)
{
    if (!well) {
        fprintf(stderr, "%s: %s\n", what, strerror(errno));
        exit(1);
    }
}

static size_t length(void)
{
    switch (draw(4)) {
    case 0: return 1 + draw(100);
    case 1: return 4096;
    case 2: return 1 + draw(20000);
    default: return 1 + draw(LARGEST);
    }
}

static void told(const char *what, long long result)
{
    printf("%s %lld %d\n", what, result, result < 0 ? errno : 0);
}

static void read_back(int fd, off_t end)
{
    struct stat stat;
    off_t from = end > LARGEST ? end - (off_t)draw(LARGEST) : 0;
    ssize_t found = pread(fd, other, LARGEST, from);
    unsigned sum = 0;
    for (ssize_t at = 0; at < found; at++)
        sum = sum * 31 + other[at];
    printf("read %zd %u\n", found, sum);
    must(fstat(fd, &stat) == 0, "fstat");
    printf("size %lld\n", (long long)stat.st_size);
}

static void in_a_child(int fd, size_t part)
{
    pid_t child = fork();
    must(child >= 0, "fork");
    if (child == 0)
        _exit(write(fd, bytes, part) == (ssize_t)part ? 0 : 1);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
}

static void by_stdio(int fd, size_t part)
{
    FILE *stream = fdopen(dup(fd), "r+");
    must(stream != NULL, "fdopen");
    told("fwrite", (long long)fwrite(bytes, 1, part, stream));
    must(fflush(stream) == 0, "fflush");
    told("write beside", write(fileno(stream), bytes, part / 2 + 1));
    must(fclose(stream) == 0, "fclose");
}

static void out_of_it(int fd, off_t end, const char *path)
{
    char name[4096];
    snprintf(name, sizeof name, "%s.copy", path);
    int copy = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    off_t from = end > 3 * BLOCK ? end - 3 * BLOCK : 0;
    must(copy >= 0, "open");
    told("sendfile", sendfile(copy, fd, &from, 4 * BLOCK));
    from = end > BLOCK ? end - BLOCK : 0;
    told("copy", copy_file_range(fd, &from, copy, NULL, 2 * BLOCK, 0));
    must(close(copy) == 0, "close");
}

static void mapped(int fd, off_t end)
{
    if (end == 0)
        return;
    const unsigned char *map = mmap(NULL, end, PROT_READ, MAP_SHARED, fd, 0);
    must(map != MAP_FAILED, "mmap");
    unsigned sum = 0;
    for (off_t at = 0; at < end; at += 509)
        sum = sum * 31 + map[at];
    printf("mapped %u %u\n", sum, map[end - 1]);
    must(munmap((void *)map, end) == 0, "munmap");
}

static void mix(const char *path, int count)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(fd >= 0, "open");
    for (int done = 0; done < count; done++) {
        size_t part = length();
        off_t end = lseek(fd, 0, SEEK_CUR), there;
        for (size_t at = 0; at < part; at += 8)
            memcpy(bytes + at, &(uint64_t){draw(UINT64_MAX)}, 8);
        struct iovec parts[4] = {
            {bytes, part / 3}, {bytes + 7, 0}, {bytes + part / 3, part - part / 3}, {bytes, part / 5}};
        switch (draw(60)) {
        default: told("write", write(fd, bytes, part)); break;
        case 30 ... 39: told("writev", writev(fd, parts, 4)); break;
        case 40: told("pwrite", pwrite(fd, bytes, part, draw(end + 1))); break;
        case 41 ... 43: told("pwrite at it", pwrite(fd, bytes, part, end)); break;
        case 44: told("pwritev", pwritev(fd, parts, 3, end + draw(9000))); break;
        case 45: told("end", lseek(fd, 0, SEEK_END)); break;
        case 46: told("seek", lseek(fd, draw(end + 5000), SEEK_SET)); break;
        case 47: told("cut", ftruncate(fd, draw(end + 1))); break;
        case 48: told("longer", ftruncate(fd, end + draw(LARGEST))); break;
        case 49 ... 51: read_back(fd, end); break;
        case 52: in_a_child(fd, part); break;
        case 53: by_stdio(fd, part); break;
        case 54:
            must(fcntl(fd, F_SETFL, O_APPEND) == 0, "append");
            told("appended", write(fd, bytes, part));
            must(fcntl(fd, F_SETFL, 0) == 0, "append no more");
            told("place", lseek(fd, 0, SEEK_CUR));
            break;
        case 55: {
            int same = dup(fd);
            told("by a duplicate", write(same, bytes, part));
            must(close(same) == 0, "close");
            break;
        }
        case 56: out_of_it(fd, end, path); break;
        case 57:
            there = lseek(fd, 0, SEEK_CUR);
            must(close(fd) == 0, "close");
            fd = open(path, O_RDWR);
            must(fd >= 0 && lseek(fd, there, SEEK_SET) == there, "open anew");
            break;
        case 58: told("none", write(fd, bytes, 0)); break;
        case 59: told("no place", pwrite(fd, bytes, part, -5)); break;
        }
        if (done == count - count / 8)
            mapped(fd, lseek(fd, 0, SEEK_END));
    }
    read_back(fd, lseek(fd, 0, SEEK_END));
    must(close(fd) == 0, "close");
}

static int shared;

static void *records(void *number)
{
    unsigned char record[RECORD];
    for (int done = 0; done < RECORDS; done++) {
        memset(record, (int)(intptr_t)number, RECORD);
        memcpy(record, &done, sizeof done);
        must(write(shared, record, RECORD) == RECORD, "write");
    }
    return NULL;
}

static void half(int first, int count)
{
    pthread_t threads[16];
    for (int at = 0; at < count; at++)
        must(pthread_create(&threads[at], NULL, records, (void *)(intptr_t)(first + at)) == 0, "thread");
    for (int at = 0; at < count; at++)
        must(pthread_join(threads[at], NULL) == 0, "join");
}

static void share(const char *path, int writers)
{
    static unsigned char seen[32][RECORDS];
    shared = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(shared >= 0, "open");
    /* So that the child begins with a lease of its parent's. */
    must(write(shared, bytes, LARGEST) == LARGEST && write(shared, bytes, LARGEST) == LARGEST, "write");
    pid_t child = fork();
    must(child >= 0, "fork");
    half(child ? 1 : 1 + writers / 2, writers / 2);
    if (child == 0)
        exit(0);
    int status;
    must(waitpid(child, &status, 0) == child && status == 0, "the child");
    long count = (long)writers / 2 * 2 * RECORDS;
    for (long at = 0; at < count; at++) {
        unsigned char record[RECORD];
        int number;
        must(pread(shared, record, RECORD, 2 * LARGEST + at * RECORD) == RECORD, "read");
        memcpy(&number, record, sizeof number);
        must(number >= 0 && number < RECORDS && record[4] < 32, "a record");
        for (int byte = 4; byte < RECORD; byte++)
            must(record[byte] == record[4], "a whole record");
        must(seen[record[4]][number]++ == 0, "each record once");
    }
    struct stat stat;
    must(fstat(shared, &stat) == 0 && stat.st_size == 2 * LARGEST + count * RECORD, "the length");
    puts("all there");
}

static volatile sig_atomic_t signals;

static void counted(int number)
{
    (void)number;
    signals = signals + 1;
}

static void limit(const char *path)
{
    struct rlimit most = {10 * LARGEST + 100, RLIM_INFINITY};
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(fd >= 0 && signal(SIGXFSZ, counted) != SIG_ERR, "open");
    must(setrlimit(RLIMIT_FSIZE, &most) == 0, "a limit");
    for (int done = 0; done < 13; done++) {
        struct iovec parts[2] = {{bytes, LARGEST - 100}, {bytes, 100}};
        told("write", done % 2 ? write(fd, bytes, LARGEST) : writev(fd, parts, 2));
        printf("signals %d place %lld\n", (int)signals, (long long)lseek(fd, 0, SEEK_CUR));
    }
}

static void blocks(const char *path, long count, long pause)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    must(fd >= 0, "open");
    for (long done = 0; done < count; done++) {
        memset(bytes, (int)(done % 251), BLOCK);
        if (write(fd, bytes, BLOCK) != BLOCK)
            break;
        dprintf(1, "%ld\n", done + 1);
        nanosleep(&(struct timespec){0, pause}, NULL);
    }
}

static void odd(const char *path)
{
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    unsigned char *pages = mmap(NULL, 2 * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(fd >= 0 && pages != MAP_FAILED && mprotect(pages + BLOCK, BLOCK, PROT_NONE) == 0, "a page");
    for (int done = 0; done < 4; done++)
        told("write", write(fd, bytes, LARGEST));
    told("bad memory", write(fd, pages + BLOCK, 10));
    errno = E2BIG;
    told("write", write(fd, bytes, BLOCK));
    printf("errno %d\n", errno);
    /* As daemons do: all but what is needed. */
    for (int number = 3; number < 1024; number++)
        if (number != fd)
            close(number);
    told("write", write(fd, bytes, BLOCK));
    must(close_range(fd + 1, ~0U, 0) == 0, "close_range");
    told("write", write(fd, bytes, BLOCK));
    /* A file under each number that something hidden may have. */
    int null = open("/dev/null", O_RDWR);
    for (int number = 890; number < 960; number++)
        must(dup2(null, number) == number, "dup2");
    told("write", write(fd, bytes, LARGEST));
    told("write", write(fd, bytes, LARGEST));
    for (int number = 890; number < 960; number++)
        must(write(number, bytes, 10) == 10 && close(number) == 0, "mine");
    /* Another file under the number, by a way that no library sees. */
    int next = open(path, O_RDWR);
    told("cut", ftruncate(next, 3 * LARGEST));
    must(syscall(SYS_dup2, next, fd) == fd, "dup2");
    told("write", write(fd, bytes, BLOCK));
    told("place", lseek(next, 0, SEEK_CUR));
    struct stat stat;
    must(fstat(fd, &stat) == 0, "fstat");
    printf("size %lld\n", (long long)stat.st_size);
}

int main(int argc, char **argv)
{
    for (size_t at = 0; at < sizeof bytes; at++)
        bytes[at] = (unsigned char)(at * 7 + at / 256);
    must(argc > 2, "what, and a file");
    if (!strcmp(argv[1], "mix") && argc > 4) {
        state = strtoull(argv[3], NULL, 10) * 0x9e3779b97f4a7c15 + 1;
        mix(argv[2], atoi(argv[4]));
    } else if (!strcmp(argv[1], "share") && argc > 3) {
        share(argv[2], atoi(argv[3]));
    } else if (!strcmp(argv[1], "limit")) {
        limit(argv[2]);
    } else if (!strcmp(argv[1], "blocks") && argc > 4) {
        blocks(argv[2], atol(argv[3]), atol(argv[4]));
    } else if (!strcmp(argv[1], "odd")) {
        odd(argv[2]);
    } else {
        return 2;
    }
    return 0;
}
