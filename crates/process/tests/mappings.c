// As step.c, with every kind of mapping; each step looks at all of them, and at /proc/self/maps.
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, SIZE = 16 * PAGE };

static void check(int good, int code) {
    if (good) return;
    char text[64];
    int length = snprintf(text, sizeof text, "wrong %d %d\n", code, errno);
    // A test that does not come to read it shows it.
    (void)!write(1, text, length), (void)!write(2, text, length);
    _exit(code);
}

static char *map(int protection, int flags, int fd, off_t offset) {
    char *at = mmap(0, SIZE, protection, flags, fd, offset);
    check(at != MAP_FAILED, 10);
    return at;
}

static int readable(const char *at) {
    // The kernel says EFAULT where a program would fault.
    return syscall(SYS_rt_sigprocmask, SIG_BLOCK, at, 0, 8) == 0;
}

static sigjmp_buf back;
static void fault(int signal) { (void)signal; siglongjmp(back, 1); }
static int writable(char *at) {
    if (sigsetjmp(back, 1)) return 0;
    *(volatile char *)at = *(volatile char *)at;
    return 1;
}

static char maps[1 << 16];
static char *gone, *shared;
// Everything but the stack, which may grow, and what has lost its file: it comes back as memory
// without.
static unsigned long shape(void) {
    int fd = open("/proc/self/maps", O_RDONLY), length = 0, count;
    while ((count = read(fd, maps + length, sizeof maps - 1 - length)) > 0) length += count;
    close(fd);
    maps[length] = 0;
    unsigned long hash = 5381, end = 0;
    char before[512] = "";
    for (char *line = strtok(maps, "\n"); line; line = strtok(0, "\n")) {
        char modes[8] = "", name[256] = "", what[512];
        unsigned long from, to;
        sscanf(line, "%lx-%lx %7s %*s %*s %*s %255s", &from, &to, modes, name);
        if (from == (unsigned long)gone || from == (unsigned long)shared || !strcmp(name, "[stack]")) continue;
        snprintf(what, sizeof what, "%s %s", modes, name);
        // The kernel may make one mapping of two, or not.
        if (from != end || strcmp(what, before)) hash = (hash ^ end) * 33 ^ from;
        for (char *at = what; strcmp(what, before) && *at; at++) hash = hash * 33 + *at;
        end = to, strcpy(before, what);
    }
    return hash;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    int anonymous = MAP_PRIVATE | MAP_ANONYMOUS, both = PROT_READ | PROT_WRITE;

    char *plain = map(both, anonymous, -1, 0);
    memcpy(plain + 5 * PAGE, &nonce, 8);
    char *hidden = map(both, anonymous, -1, 0);
    memcpy(hidden + PAGE, &nonce, 8);
    check(!mprotect(hidden, SIZE, PROT_NONE), 11);
    char *constant = map(both, anonymous, -1, 0);
    memcpy(constant, &nonce, 8);
    check(!mprotect(constant, SIZE, PROT_READ), 12);
    char *unforked = map(both, anonymous, -1, 0);
    memcpy(unforked + 3 * PAGE, &nonce, 8);
    check(!madvise(unforked, SIZE, MADV_DONTFORK), 13);
    char *large = mmap(0, 1l << 36, PROT_READ | PROT_WRITE, anonymous | MAP_NORESERVE, -1, 0);
    check(large != MAP_FAILED, 14);
    memcpy(large + (1l << 35), &nonce, 8);
    char *locked = map(both, anonymous, -1, 0);
    int lock = mlock(locked, PAGE);
    memcpy(locked, &nonce, 8);
    // Pages in its midst that fault, where the kernel has such guards; and memory with a name.
    char *guarded = map(both, anonymous, -1, 0);
    memcpy(guarded + 6 * PAGE + 64, &nonce, 8);
    int guards = !madvise(guarded + 3 * PAGE, 2 * PAGE, 102);
    char *named = map(both, anonymous, -1, 0);
    (void)!prctl(0x53564d41, 0, named, SIZE, "what it is called");
    // Code that the program has written.
    char *code = map(both, anonymous, -1, 0);
    memcpy(code, "\x48\x8d\x47\x01\xc3", 5);
    check(!mprotect(code, SIZE, PROT_READ | PROT_EXEC), 15);

    char name[64];
    snprintf(name, sizeof name, "/tmp/kedge-mappings-%d", getpid());
    int file = open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    check(file >= 0 && !ftruncate(file, SIZE) && pwrite(file, "here", 4, 2 * PAGE) == 4, 16);
    gone = map(both, MAP_PRIVATE, file, 0);
    memcpy(gone + PAGE, &nonce, 8);
    shared = map(both, MAP_SHARED, file, 0);
    close(file), unlink(name);
    memcpy(shared + 7 * PAGE, &nonce, 8);
    int self = open("/proc/self/exe", O_RDONLY);
    char *changed = map(both, MAP_PRIVATE, self, 0);
    close(self);
    memset(changed + 64, 0, PAGE - 64);

    struct sigaction action = {.sa_handler = fault, .sa_flags = SA_NODEFER};
    check(!sigaction(SIGSEGV, &action, 0), 17);
    void *heap = sbrk(0);
    umask(027);
    check(!chdir("/usr"), 18);
    struct rlimit limit = {100, 200}, found;
    check(!setrlimit(RLIMIT_NOFILE, &limit), 19);
    struct itimerval timer = {{0, 0}, {5000, 0}}, left;
    check(!setitimer(ITIMER_REAL, &timer, 0), 20);
    check(!prctl(PR_SET_DUMPABLE, 1) && !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 21);
    char exe[256] = "", now[256] = "";
    check(readlink("/proc/self/exe", exe, sizeof exe - 1) > 0, 22);
    unsigned long start = shape();
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        check(!memcmp(plain + 5 * PAGE, &nonce, 8) && plain[0] == 0, 30);
        check(!readable(hidden + PAGE) && !writable(hidden), 31);
        check(!memcmp(constant, &nonce, 8) && !writable(constant), 32);
        check(!memcmp(unforked + 3 * PAGE, &nonce, 8), 33);
        check(!memcmp(large + (1l << 35), &nonce, 8) && large[1l << 34] == 0, 34);
        check(!memcmp(locked, &nonce, 8) && (!lock) == (munlock(locked, PAGE) == 0), 35);
        if (!lock) check(!mlock(locked, PAGE), 36);
        check(((long (*)(long))code)(step) == step + 1 && !writable(code), 37);
        check(!memcmp(gone + PAGE, &nonce, 8) && !memcmp(gone + 2 * PAGE, "here", 4), 38);
        check(!memcmp(shared + 7 * PAGE, &nonce, 8) && !memcmp(shared + 2 * PAGE, "here", 4), 39);
        check(!memcmp(changed, "\x7f" "ELF", 4) && changed[64] == 0 && changed[PAGE - 1] == 0, 40);
        check(sbrk(0) == heap, 41);
        for (int page = 0; page < 16; page++)
            check(readable(guarded + page * PAGE) == !(guards && (page == 3 || page == 4)), 52);
        check(!memcmp(guarded + 6 * PAGE + 64, &nonce, 8), 53);
        mode_t mask = umask(0);
        check(mask == 027 && umask(mask) == 0, 42);
        check(getcwd(now, sizeof now) && !strcmp(now, "/usr"), 43);
        check(!getrlimit(RLIMIT_NOFILE, &found) && found.rlim_cur == 100 && found.rlim_max == 200, 44);
        check(!getitimer(ITIMER_REAL, &left) && left.it_value.tv_sec > 4000, 45);
        check(prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 && prctl(PR_GET_DUMPABLE) == 1, 46);
        memset(now, 0, sizeof now);
        check(readlink("/proc/self/exe", now, sizeof now - 1) > 0 && !strcmp(exe, now), 47);
        // Whoever watches memory parts mappings and joins them again while this runs, and a list
        // that is read meanwhile may have a part twice: what stays so is wrong.
        for (int tries = 0; shape() != start; tries++) check(tries < 500, 48), usleep(1000);
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        check(write(1, line, length) == length, 49);
        usleep(2000);
    }
    // What was hidden is still there.
    check(!mprotect(hidden, SIZE, PROT_READ) && !memcmp(hidden + PAGE, &nonce, 8), 50);
    void *more = sbrk(1 << 20);
    check(more == heap && *(char *)(more + 5000) == 0, 51);
    return 7;
}
