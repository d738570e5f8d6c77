// As step.c, by a vDSO that is made another kernel's: its code differs. A thread reads clocks all
// the time, so that it is inside of the vDSO at most moments. Ends with 7 if the vDSO lies
// elsewhere in the end and the old code leads there.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef int Gettime(clockid_t, struct timespec *);
typedef time_t Time(time_t *);
typedef int Getcpu(unsigned *, unsigned *, void *);

static Gettime *gettime;
static Time *seconds;
static Getcpu *getcpu_there;

static void wrong(const char *what) {
    char text[64];
    (void)!write(1, text, snprintf(text, sizeof text, "wrong %s\n", what));
    _exit(1);
}

static long long nanoseconds(struct timespec at) { return at.tv_sec * 1000000000ll + at.tv_nsec; }

static long long by_call(clockid_t clock) {
    struct timespec at;
    if (syscall(SYS_clock_gettime, clock, &at)) wrong("call");
    return nanoseconds(at);
}

// What the vDSO says lies between what the kernel says before and after; coarse clocks are a tick
// behind at most.
static void check(clockid_t clock, long long behind) {
    struct timespec at;
    long long before = by_call(clock);
    if (gettime(clock, &at)) wrong("clock");
    if (nanoseconds(at) < before - behind || nanoseconds(at) > by_call(clock)) wrong("time");
}

static void *reader(void *none) {
    struct timespec at;
    for (long long last = 0;; last = nanoseconds(at)) {
        if (gettime(CLOCK_MONOTONIC, &at)) wrong("clock");
        if (nanoseconds(at) < last) wrong("backwards");
    }
    return none;
}

// Where the vDSO lies, by its name.
static char *named(char **end) {
    char line[256], *start = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (fgets(line, sizeof line, maps))
        if (strstr(line, "[vdso]")) sscanf(line, "%p-%p", (void **)&start, (void **)end);
    fclose(maps);
    return start;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    char *vdso = (char *)getauxval(AT_SYSINFO_EHDR), *end, *start = named(&end);
    if (start != vdso || mprotect(vdso, end - vdso, PROT_READ | PROT_WRITE | PROT_EXEC)) wrong("vdso");
    memset(vdso + 9, 'k', 7); // What the ELF header has no use for.
    void *library = dlopen("linux-vdso.so.1", RTLD_LAZY | RTLD_NOLOAD);
    gettime = (Gettime *)dlsym(library, "__vdso_clock_gettime");
    seconds = (Time *)dlsym(library, "__vdso_time");
    getcpu_there = (Getcpu *)dlsym(library, "__vdso_getcpu");
#ifdef WITHOUT_FUNCTIONS
    memset(vdso + 0x3c, 0, 2); // The number of sections.
#endif
    mprotect(vdso, end - vdso, PROT_READ | PROT_EXEC);
    pthread_t thread;
    if (!gettime || !seconds || !getcpu_there || pthread_create(&thread, 0, reader, 0)) wrong("start");
    uint64_t nonce, value;
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        check(CLOCK_MONOTONIC, 0), check(CLOCK_REALTIME, 0);
        check(CLOCK_MONOTONIC_COARSE, 20000000), check(CLOCK_BOOTTIME, 0);
        time_t now = by_call(CLOCK_REALTIME_COARSE) / 1000000000, then = seconds(0);
        unsigned cpu = -1;
        if (then < now || then > now + 1) wrong("seconds");
        if (getcpu_there(&cpu, 0, 0) || cpu >= sysconf(_SC_NPROCESSORS_CONF)) wrong("processor");
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        char line[128];
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        if (write(1, line, length) != length) return 2;
        usleep(2000);
    }
    int elsewhere = named(&end) != vdso, leads = *(unsigned char *)gettime == 0xe9;
    return elsewhere && leads ? 7 : 6;
}
