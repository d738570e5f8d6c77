/* Does to the files of a folder what its standard input says, one line for each call, and says what
 * came of it: so that several processes can do the same to two folders.
 *
 *   cache_ops FOLDER LONGEST [mixed]
 *
 * Files are opened by number, up to SLOTS at a time. No write at a file's position begins behind
 * LONGEST bytes. Where others write by themselves (mixed), nothing is said of the position that an
 * appended write leaves: the kernel does not know where the file ended then.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define SLOTS 6
#define MOST (16 << 20)
#define ALIGNED 4096

static int slots[SLOTS];
static unsigned char *bytes;
static const char *folder;
static off_t longest;
static int mixed;

static void fill(unsigned char *to, size_t length, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
    for (size_t at = 0; at < length; at++) {
        if (at % 8 == 0) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
        }
        to[at] = (unsigned char)(state >> (at % 8 * 8));
    }
}

static uint64_t sum(const unsigned char *from, size_t length)
{
    uint64_t total = length;
    for (size_t at = 0; at < length; at++)
        total = total * 31 + from[at];
    return total;
}

/* What a call returned, or the error. */
static void told(long long result)
{
    printf("%lld", result < 0 ? -(long long)errno : result);
}

static const char *path(const char *name)
{
    static char paths[2][4096];
    static int next;
    next = !next;
    snprintf(paths[next], sizeof paths[next], "%s/%s", folder, name);
    return paths[next];
}

static void read_at(int fd, size_t length, off_t offset)
{
    ssize_t got = pread(fd, bytes, length, offset);
    told(got);
    if (got > 0)
        printf(" %llu", (unsigned long long)sum(bytes, got));
}

static void digest(const char *name)
{
    int fd = open(path(name), O_RDONLY);
    uint64_t total = 0;
    off_t end = 0;
    ssize_t got;
    if (fd < 0) {
        told(fd);
        return;
    }
    while ((got = pread(fd, bytes, MOST, end)) > 0) {
        total = total * 31 + sum(bytes, got);
        end += got;
    }
    told(got < 0 ? got : end);
    printf(" %llu", (unsigned long long)total);
    close(fd);
}

static void attributes(const char *name)
{
    struct stat stat;
    int result = lstat(path(name), &stat);
    told(result);
    if (result == 0)
        printf(" %lld %o %d", S_ISREG(stat.st_mode) ? (long long)stat.st_size : 0, stat.st_mode,
               S_ISDIR(stat.st_mode) ? 0 : (int)stat.st_nlink);
}

static void position(int fd)
{
    int flags = fcntl(fd, F_GETFL);
    if (!mixed || flags < 0 || !(flags & O_APPEND))
        printf(" %lld", (long long)lseek(fd, 0, SEEK_CUR));
    printf(" ");
}

/* A mapping of what there is of a range; whoever maps a file asks where it ends. */
static unsigned char *map(int fd, off_t *offset, size_t *length, int kind)
{
    struct stat stat;
    *offset -= *offset % ALIGNED;
    if (fstat(fd, &stat) != 0 || *offset >= stat.st_size)
        return NULL;
    if ((off_t)*length > stat.st_size - *offset)
        *length = stat.st_size - *offset;
    void *at = mmap(NULL, *length, kind == 'r' ? PROT_READ : PROT_READ | PROT_WRITE,
                    kind == 'p' ? MAP_PRIVATE : MAP_SHARED, fd, *offset);
    if (at == MAP_FAILED) {
        told(-1);
        return NULL;
    }
    return at;
}

static void mapped(int fd, off_t offset, size_t length, uint64_t seed, int kind)
{
    unsigned char *at = map(fd, &offset, &length, kind);
    if (at == NULL)
        return;
    printf("%zu %llu", length, (unsigned long long)sum(at, length));
    if (kind != 'r') {
        fill(at + length / 3, length / 2, seed);
        printf(" %llu", (unsigned long long)sum(at, length));
    }
    if (kind == 's' && seed % 2)
        printf(" %d", msync(at, length, MS_SYNC));
    printf(" %d", munmap(at, length));
}

static void copied(int from, off_t offset, int to, off_t place, size_t length, int send)
{
    struct stat stat;
    if (fstat(from, &stat) != 0 || fstat(to, &stat) != 0)
        printf("closed ");
    if (send) {
        told(lseek(to, place, SEEK_SET) < 0 ? -1 : sendfile(to, from, &offset, length));
    } else {
        told(copy_file_range(from, &offset, to, &place, length, 0));
    }
    printf(" %lld", (long long)offset);
}

static void write_some(int fd, size_t length, uint64_t seed, int vectors)
{
    off_t at = lseek(fd, 0, SEEK_CUR);
    fill(bytes, length, seed);
    if (at > longest)
        at = lseek(fd, 0, SEEK_SET);
    size_t third = length / 3;
    struct iovec parts[3] = {{bytes, third}, {bytes, 0}, {bytes + third, length - third}};
    told(vectors ? writev(fd, parts, 3) : write(fd, bytes, length));
    position(fd);
}

static void written_by_child(int fd, size_t length, uint64_t seed)
{
    int status = 0;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        fill(bytes, length, seed);
        _exit(lseek(fd, 0, SEEK_CUR) <= longest && write(fd, bytes, length) != (ssize_t)length);
    }
    told(waitpid(child, &status, 0) == child ? status : -1);
    position(fd);
}

static int compare(const void *one, const void *other)
{
    return strcmp(*(char *const *)one, *(char *const *)other);
}

static void listed(const char *name)
{
    DIR *dir = opendir(path(name));
    char *names[64];
    size_t count = 0;
    for (struct dirent *entry; dir != NULL && count < 64 && (entry = readdir(dir)) != NULL;)
        names[count++] = strdup(entry->d_name);
    qsort(names, count, sizeof *names, compare);
    for (size_t at = 0; at < count; at++) {
        printf("%s ", names[at]);
        free(names[at]);
    }
    if (dir != NULL)
        closedir(dir);
}

static void linked_to(const char *name)
{
    char target[256];
    ssize_t length = readlink(path(name), target, sizeof target);
    told(length);
    if (length > 0)
        printf(" %.*s", (int)length, target);
}

static void opened(unsigned slot, const char *name, int flags)
{
    if (slots[slot] >= 0)
        close(slots[slot]);
    slots[slot] = open(path(name), flags, 0644);
    told(slots[slot] < 0 ? -1 : 0);
}

static void by_name(const char *call, const char *one, const char *two, long long number)
{
    if (!strcmp(call, "unlink"))
        told(unlink(path(one)));
    else if (!strcmp(call, "rename"))
        told(rename(path(one), path(two)));
    else if (!strcmp(call, "exchange"))
        told(renameat2(AT_FDCWD, path(one), AT_FDCWD, path(two), RENAME_EXCHANGE));
    else if (!strcmp(call, "link"))
        told(link(path(one), path(two)));
    else if (!strcmp(call, "symlink"))
        told(symlink(one, path(two)));
    else if (!strcmp(call, "readlink"))
        linked_to(one);
    else if (!strcmp(call, "chmod"))
        told(chmod(path(one), (mode_t)number));
    else if (!strcmp(call, "truncate"))
        told(truncate(path(one), number));
    else if (!strcmp(call, "stat"))
        attributes(one);
    else if (!strcmp(call, "digest"))
        digest(one);
    else
        listed(one);
}

static void by_slot(const char *call, const long long *n)
{
    int fd = slots[n[0] % SLOTS];
    size_t length = (size_t)n[2] % MOST;
    if (!strcmp(call, "close"))
        slots[n[0] % SLOTS] = (told(close(fd)), -1);
    else if (!strcmp(call, "seek"))
        told(lseek(fd, n[1], (int)n[2]));
    else if (!strcmp(call, "write") || !strcmp(call, "writev"))
        write_some(fd, length, n[3], call[5] == 'v');
    else if (!strcmp(call, "burst"))
        for (long long at = 0; at < n[1]; at++)
            write_some(fd, length, n[3] + at, 0);
    else if (!strcmp(call, "child"))
        written_by_child(fd, length, n[3]);
    else if (!strcmp(call, "pwrite"))
        fill(bytes, length, n[3]), told(pwrite(fd, bytes, length, n[1]));
    else if (!strcmp(call, "pread"))
        read_at(fd, length, n[1]);
    else if (!strcmp(call, "ftruncate"))
        told(ftruncate(fd, n[1]));
    else if (!strcmp(call, "fsync"))
        told(n[1] % 2 ? fsync(fd) : fdatasync(fd));
    else if (!strcmp(call, "fallocate"))
        told(fallocate(fd, (int)n[3], n[1], n[2]));
    else if (!strncmp(call, "map", 3))
        mapped(fd, n[1], length, n[3], call[3]);
    else
        copied(fd, n[1], slots[n[3] % SLOTS], n[4], length, !strcmp(call, "sendfile"));
}

int main(int count, char **words)
{
    char line[1024], call[32], one[256], two[256];
    long long n[5];
    if (count < 3 || posix_memalign((void **)&bytes, ALIGNED, MOST) != 0)
        return 2;
    folder = words[1];
    longest = atoll(words[2]);
    mixed = count > 3;
    memset(slots, -1, sizeof slots);
    while (fgets(line, sizeof line, stdin) != NULL) {
        memset(n, 0, sizeof n);
        if (sscanf(line, "open %lld %255s %lld", &n[0], one, &n[1]) == 3)
            opened(n[0] % SLOTS, one, (int)n[1]);
        else if (sscanf(line, "name %31s %255s %255s %lld", call, one, two, &n[0]) == 4)
            by_name(call, one, two, n[0]);
        else if (sscanf(line, "%31s %lld %lld %lld %lld %lld", call, &n[0], &n[1], &n[2], &n[3],
                        &n[4]) >= 2)
            by_slot(call, n);
        printf("\n");
        fflush(stdout);
    }
    return 0;
}
