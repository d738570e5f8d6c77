// Counts steps, and is hardly ever at rest meanwhile: at each it waits for a child of vfork() to
// become another program ("vfork"), or becomes itself anew, by the last of its threads ("exec").
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 24 };

static char *how, *name, *steps;
static uint64_t nonce, value;
static double sum;
static int step;

static int wrong(const char *what) {
    printf("wrong: %s\n", what);
    fflush(stdout);
    return 1;
}

static void doze(long microseconds) {
    struct timespec moment = {0, microseconds * 1000};
    while (nanosleep(&moment, &moment)) {}
}

static void say(void) {
    step++;
    sum += 1.0 / step;
    value = value * 6364136223846793005u + 1;
    printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
    fflush(stdout);
}

static int spawn(void) {
    int status;
    pid_t pid = vfork();
    if (!pid) {
        doze(20000);
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return wrong("no child");
    return status ? wrong("the child failed") : 0;
}

static void *idle(void *unused) {
    for (;;) pause();
    return unused;
}

static void *become(void *unused) {
    char words[4][32];
    snprintf(words[0], 32, "%lx", nonce);
    snprintf(words[1], 32, "%lx", value);
    snprintf(words[2], 32, "%a", sum);
    snprintf(words[3], 32, "%d", step);
    execl("/proc/self/exe", name, how, steps, words[0], words[1], words[2], words[3], NULL);
    exit(wrong("no exec"));
    return unused;
}

int main(int argc, char **argv) {
    name = argv[0], how = argv[1], steps = argv[2];
    getrandom(&nonce, sizeof nonce, 0);
    value = nonce;
    if (argc > 3) {
        nonce = strtoull(argv[3], 0, 16), value = strtoull(argv[4], 0, 16);
        sum = strtod(argv[5], 0), step = atoi(argv[6]);
    }
    while (step < atoi(steps)) {
        say();
        if (how[0] == 'v') {
            if (spawn()) return 1;
            continue;
        }
        pthread_t thread;
        for (int i = 0; i < THREADS; i++)
            if (pthread_create(&thread, 0, i < THREADS - 1 ? idle : become, 0)) return wrong("no thread");
        idle(0);
    }
    return 7;
}
