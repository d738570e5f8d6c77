/* Files, directories, devices and pipes. */
#include "plugins_child.h"
#include <sys/file.h>

static void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0640);
    say(fd, text);
    EXPECT(close(fd) == 0);
}

/* Offsets, shared and not; close-on-exec is tested by the table. */
static void make_offsets(void) {
    write_file("read", "0123456789");
    put(open("read", O_RDONLY), 10);
    EXPECT(lseek(10, 3, SEEK_SET) == 3);
    EXPECT(dup2(10, 11) == 11);
    put(open("read", O_RDONLY), 12);
    put(open("written", O_RDWR | O_CREAT, 0600), 13);
    say(13, "what was written");
}

static void check_offsets(int role) {
    expect_text(10, "34");
    expect_text(11, "56");
    expect_text(12, "012");
    EXPECT(lseek(13, 0, SEEK_CUR) == 16);
    EXPECT(lseek(13, 0, SEEK_SET) == 0);
    expect_text(13, "what was written");
    expect_end(13);
    EXPECT(fcntl(10, F_GETFL) == (O_RDONLY | 0100000 /* O_LARGEFILE */));
}

/* A temporary file that is only read; it may be another one's after a restart. */
static void make_passing(void) {
    char path[64];
    snprintf(path, sizeof path, "/tmp/kedge-passing-%d", (int)getpid());
    write_file(path, "0123456789");
    put(open(path, O_RDONLY), 10);
    EXPECT(lseek(10, 3, SEEK_SET) == 3);
}

static void check_passing(int role) { expect_text(10, "34"); }

/* Parent and child share an offset, as after fork. */
static void make_shared(void) {
    write_file("read", "0123456789");
    put(open("read", O_RDONLY), 10);
    put(open("order", O_RDWR | O_CREAT, 0600), 11);
    fork_role(NULL);
}

static void check_shared(int role) {
    /* The first to come reads what the other does not. */
    char byte;
    EXPECT(read(10, &byte, 1) == 1);
    EXPECT(byte == '0' || byte == '1');
    char want = byte == '0' ? '1' : '0';
    EXPECT(pwrite(11, &byte, 1, byte - '0') == 1);
    for (;;) {
        char other = 0;
        if (pread(11, &other, 1, want - '0') == 1 && other == want)
            return;
        usleep(1000);
    }
}

static void make_append(void) {
    write_file("log", "one\n");
    put(open("log", O_WRONLY | O_APPEND | O_NONBLOCK), 10);
    say(10, "two\n");
    put(open("log", O_RDONLY), 11);
}

static void check_append(int role) {
    EXPECT((fcntl(10, F_GETFL) & (O_APPEND | O_NONBLOCK | O_ACCMODE)) == (O_APPEND | O_NONBLOCK | O_WRONLY));
    EXPECT(lseek(10, 0, SEEK_SET) == 0);
    say(10, "three\n");
    expect_text(11, "one\ntwo\nthree\n");
    expect_end(11);
}

/* Removed, never named, replaced by another, with all permissions taken away. */
static void make_unlinked(void) {
    put(open("gone", O_RDWR | O_CREAT, 0600), 10);
    say(10, "gone but here");
    put(open("gone", O_RDONLY), 11);
    EXPECT(unlink("gone") == 0);
    put(open(".", O_TMPFILE | O_RDWR, 0600), 12);
    say(12, "never named");
    write_file("replaced", "old");
    put(open("replaced", O_RDONLY), 13);
    write_file("new", "new");
    EXPECT(rename("new", "replaced") == 0);
    put(open("forbidden", O_RDWR | O_CREAT, 0600), 14);
    say(14, "forbidden");
    EXPECT(fchmod(14, 0) == 0);
    EXPECT(mkdir("folder", 0700) == 0);
    put(open("folder", O_RDONLY | O_DIRECTORY), 15);
    EXPECT(rmdir("folder") == 0);
    put(open("sparse", O_RDWR | O_CREAT, 0600), 16);
    EXPECT(pwrite(16, "end", 3, 1l << 36) == 3);
    EXPECT(unlink("sparse") == 0);
}

static void check_unlinked(int role) {
    struct stat stat;
    EXPECT(access("gone", F_OK) == -1);
    EXPECT(fstat(10, &stat) == 0 && stat.st_nlink == 0);
    expect_text(11, "gone but here");
    say(10, "!");
    expect_text(11, "!");
    expect_end(11);
    EXPECT(lseek(12, 0, SEEK_SET) == 0);
    expect_text(12, "never named");
    expect_text(13, "old");
    EXPECT(lseek(14, 0, SEEK_SET) == 0);
    expect_text(14, "forbidden");
    EXPECT(fstat(14, &stat) == 0 && (stat.st_mode & 07777) == 0);
    EXPECT(fstat(15, &stat) == 0 && S_ISDIR(stat.st_mode));
    char end[3];
    EXPECT(pread(16, end, 3, 1l << 36) == 3 && memcmp(end, "end", 3) == 0);
    EXPECT(fstat(16, &stat) == 0 && stat.st_blocks < 100);
}

static void make_paths(void) {
    put(open(".", O_RDONLY | O_DIRECTORY), 10);
    EXPECT(symlink("nowhere", "link") == 0);
    put(open("link", O_PATH | O_NOFOLLOW), 11);
    put(open("/dev/null", O_RDWR), 12);
    put(open("/dev/zero", O_RDONLY), 13);
    put(open("/dev/urandom", O_RDONLY | O_NONBLOCK), 14);
    put(open("/dev/full", O_WRONLY), 15);
}

static void check_paths(int role) {
    char bytes[8] = "unknown";
    EXPECT(faccessat(10, "link", F_OK, AT_SYMLINK_NOFOLLOW) == 0);
    EXPECT(readlinkat(11, "", bytes, 8) == 7 && memcmp(bytes, "nowhere", 7) == 0);
    say(12, "nothing");
    expect_end(12);
    EXPECT(read(13, bytes, 8) == 8 && bytes[0] == 0 && bytes[7] == 0);
    EXPECT(read(14, bytes, 8) == 8);
    EXPECT(fcntl(14, F_GETFL) & O_NONBLOCK);
    EXPECT(write(15, "x", 1) == -1 && errno == ENOSPC);
}

/* A database in the middle of something; the test changes it afterwards. */
static void make_database(void) {
    put(open("base", O_RDWR | O_CREAT, 0600), 10);
    say(10, "state one");
}

static void check_database(int role) {
    EXPECT(lseek(10, 0, SEEK_SET) == 0);
    expect_text(10, "state one");
    expect_end(10);
    EXPECT(access("base-journal", F_OK) == -1);
    struct stat a, b;
    EXPECT(fstat(10, &a) == 0 && stat("base", &b) == 0 && a.st_ino == b.st_ino);
}

static void make_pipe_pair(int reader, int writer, int flags) {
    int ends[2];
    EXPECT(pipe2(ends, flags) == 0);
    put(ends[0], reader);
    put(ends[1], writer);
}

static void make_pipes(void) {
    make_pipe_pair(20, 21, 0);
    say(21, "in flight");
    EXPECT(fcntl(20, F_SETPIPE_SZ, 1 << 18) == 1 << 18);
    /* Its writer is gone. */
    make_pipe_pair(22, 23, 0);
    say(23, "last words");
    EXPECT(close(23) == 0);
    /* Its reader is gone. */
    make_pipe_pair(24, 25, O_NONBLOCK);
    EXPECT(close(24) == 0);
    /* Packets. */
    make_pipe_pair(26, 27, O_DIRECT);
    say(27, "one");
    say(27, "second");
    /* Full to the brim, with places that are not full. */
    make_pipe_pair(28, 29, O_NONBLOCK);
    static char page[4096];
    memset(page, 'x', sizeof page);
    while (write(29, page, 4096) == 4096)
        ;
    EXPECT(errno == EAGAIN);
    char path[32];
    put(open("/proc/self/fd/20", O_RDONLY), 30);
    sprintf(path, "/proc/self/fd/%d", 21);
    put(open(path, O_RDWR), 31);
    fork_role(NULL);
}

static void check_pipes(int role) {
    if (role == 1)
        return;
    expect_text(20, "in");
    expect_text(30, " flight");
    EXPECT(fcntl(21, F_GETPIPE_SZ) == 1 << 18);
    say(31, "more");
    expect_text(20, "more");
    expect_text(22, "last words");
    expect_end(22);
    signal(SIGPIPE, SIG_IGN);
    EVENTUALLY(write(25, "x", 1) == -1 && errno == EPIPE);
    EXPECT(fcntl(25, F_GETFL) == (O_WRONLY | O_NONBLOCK));
    char bytes[16];
    EXPECT(read(26, bytes, 16) == 3);
    EXPECT(read(26, bytes, 16) == 6);
    EXPECT(fcntl(27, F_GETFL) == (O_WRONLY | O_DIRECT));
    EXPECT(write(29, "x", 1) == -1 && errno == EAGAIN);
    size_t total = 0;
    static char page[4096];
    for (ssize_t count; (count = read(28, page, 4096)) > 0; total += count)
        for (ssize_t i = 0; i < count; i++)
            EXPECT(page[i] == 'x');
    EXPECT(errno == EAGAIN && total == 1 << 16);
}

static void make_fifos(void) {
    EXPECT(mkfifo("fifo", 0600) == 0);
    put(open("fifo", O_RDONLY | O_NONBLOCK), 20);
    put(open("fifo", O_WRONLY), 21);
    say(21, "through a fifo");
    EXPECT(mkfifo("lost", 0600) == 0);
    put(open("lost", O_RDWR), 22);
    say(22, "lost");
    EXPECT(unlink("lost") == 0);
}

static void check_fifos(int role) {
    expect_text(20, "through a fifo");
    EXPECT(fcntl(20, F_GETFL) & O_NONBLOCK);
    EXPECT(!(fcntl(21, F_GETFL) & O_NONBLOCK));
    put(open("fifo", O_WRONLY), 23);
    say(23, "again");
    expect_text(20, "again");
    expect_text(22, "lost");
    EXPECT(access("lost", F_OK) == -1);
}

static struct flock range(short type, off_t start, off_t length) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = length};
}

static void make_locks(void) {
    for (int fd = 10; fd < 14; fd++) {
        char name[16];
        sprintf(name, "locked-%d", fd);
        put(open(name, O_RDWR | O_CREAT, 0600), fd);
    }
    EXPECT(flock(10, LOCK_EX) == 0);
    struct flock write = range(F_WRLCK, 5, 10), read = range(F_RDLCK, 100, 0);
    EXPECT(fcntl(11, F_SETLK, &write) == 0);
    EXPECT(fcntl(11, F_SETLK, &read) == 0);
    EXPECT(fcntl(12, F_OFD_SETLK, &write) == 0);
    EXPECT(flock(13, LOCK_SH) == 0);
    EXPECT(dup2(11, 14) == 14);
    fork_role(NULL);
}

static void check_locks(int role) {
    if (role == 1)
        return;
    int other = open("locked-10", O_RDWR);
    EXPECT(flock(other, LOCK_SH | LOCK_NB) == -1 && errno == EWOULDBLOCK);
    EXPECT(flock(10, LOCK_UN) == 0 && flock(other, LOCK_EX | LOCK_NB) == 0);
    other = open("locked-13", O_RDWR);
    EXPECT(flock(other, LOCK_SH | LOCK_NB) == 0);
    EXPECT(flock(other, LOCK_EX | LOCK_NB) == -1 && errno == EWOULDBLOCK);
    other = open("locked-12", O_RDWR);
    struct flock asked = range(F_RDLCK, 0, 0);
    EXPECT(fcntl(other, F_OFD_GETLK, &asked) == 0);
    EXPECT(asked.l_type == F_WRLCK && asked.l_start == 5 && asked.l_len == 10);
    int child = fork();
    if (child == 0) {
        int mine = open("locked-11", O_RDWR);
        asked = range(F_WRLCK, 0, 50);
        EXPECT(fcntl(mine, F_GETLK, &asked) == 0);
        EXPECT(asked.l_type == F_WRLCK && asked.l_start == 5 && asked.l_len == 10 && asked.l_pid == getppid());
        asked = range(F_WRLCK, 50, 0);
        EXPECT(fcntl(mine, F_GETLK, &asked) == 0);
        EXPECT(asked.l_type == F_RDLCK && asked.l_start == 100 && asked.l_len == 0);
        exit(0);
    }
    int status;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
}

static void make_lease(void) {
    put(open("leased", O_RDWR | O_CREAT, 0600), 10);
    EXPECT(fcntl(10, F_SETLEASE, F_WRLCK) == 0);
}

static void check_lease(int role) {
}

/* Signals for what happens to a descriptor go to somebody. */
static void make_owner(void) {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    put(ends[0], 20);
    put(ends[1], 21);
    EXPECT(fcntl(20, F_SETSIG, SIGRTMIN) == 0);
    struct f_owner_ex owner = {F_OWNER_PID, getpid()};
    EXPECT(fcntl(20, F_SETOWN_EX, &owner) == 0);
    EXPECT(fcntl(20, F_SETFL, O_ASYNC | O_NONBLOCK) == 0);
}

static void check_owner(int role) {
    struct f_owner_ex owner;
    EXPECT(fcntl(20, F_GETSIG) == SIGRTMIN);
    EXPECT(fcntl(20, F_GETOWN_EX, &owner) == 0 && owner.type == F_OWNER_PID && owner.pid == getpid());
    EXPECT((fcntl(20, F_GETFL) & (O_ASYNC | O_NONBLOCK)) == (O_ASYNC | O_NONBLOCK));
}

const struct scenario scenarios[] = {
    {"offsets", make_offsets, check_offsets},
    {"passing", make_passing, check_passing},
    {"shared", make_shared, check_shared},
    {"append", make_append, check_append},
    {"unlinked", make_unlinked, check_unlinked},
    {"paths", make_paths, check_paths},
    {"database", make_database, check_database},
    {"pipes", make_pipes, check_pipes},
    {"fifos", make_fifos, check_fifos},
    {"locks", make_locks, check_locks},
    {"lease", make_lease, check_lease},
    {"owner", make_owner, check_owner},
    {0},
};
