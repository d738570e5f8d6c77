/* What has no path: memfd, and later others. */
#include "plugins_child.h"
#include <sys/mman.h>

static void make_memfd(void) {
    put(memfd_create("with a name", MFD_CLOEXEC | MFD_ALLOW_SEALING), 10);
    say(10, "some contents");
    EXPECT(fcntl(10, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE) == 0);
    put(open("/proc/self/fd/10", O_RDONLY), 11);
    put(memfd_create("plain", 0), 12);
    EXPECT(pwrite(12, "x", 1, 1l << 32) == 1);
}

static void check_memfd(int role) {
    char link[64] = {0};
    EXPECT(readlink("/proc/self/fd/10", link, 63) > 0 && strcmp(link, "/memfd:with a name (deleted)") == 0);
    expect_text(11, "some contents");
    EXPECT(lseek(10, 0, SEEK_CUR) == 13);
    EXPECT(fcntl(10, F_GET_SEALS) == (F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE));
    EXPECT(write(10, "x", 1) == -1 && errno == EPERM);
    EXPECT((fcntl(11, F_GETFL) & O_ACCMODE) == O_RDONLY);
    EXPECT(fcntl(12, F_GET_SEALS) == F_SEAL_SEAL);
    struct stat stat;
    EXPECT(fstat(12, &stat) == 0 && stat.st_size == (1l << 32) + 1 && stat.st_blocks < 100);
}

const struct scenario scenarios[] = {
    {"memfd", make_memfd, check_memfd},
    {0},
};
