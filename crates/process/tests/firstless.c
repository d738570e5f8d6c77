// Its first thread ends by itself when the others run: they count steps by turns with a child,
// which another thread has made, and look whether the first one is gone.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int steps;
static uint64_t *values;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int asked, answered;
static int to_child[2], from_child[2];

static void wrong(const char *what) {
    printf("wrong: %s\n", what);
    fflush(stdout);
    _exit(1);
}

/* What the kernel says of the first thread: Z when it has ended. */
static char first(void) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%d/stat", getpid(), getpid());
    FILE *file = fopen(path, "r");
    if (!file || !fgets(text, sizeof text, file)) wrong("no first thread");
    fclose(file);
    return strrchr(text, ')')[2];
}

static void wait_for_its_end(void) {
    struct timespec moment = {0, 1000000};
    for (int tries = 0; first() != 'Z'; tries++) {
        if (tries > 20000) wrong("the first thread lives");
        nanosleep(&moment, 0);
    }
}

static void child(void) {
    uint64_t value;
    while (read(to_child[0], &value, sizeof value) == sizeof value) {
        value = value * 6364136223846793005u + 1;
        if (write(from_child[1], &value, sizeof value) != sizeof value) _exit(1);
    }
    _exit(3);
}

static void *answer(void *unused) {
    if (pipe(to_child) || pipe(from_child)) wrong("no pipes");
    pid_t made = fork();
    if (made == 0) {
        close(to_child[1]);
        close(from_child[0]);
        child();
    }
    close(to_child[0]);
    close(from_child[1]);
    pthread_mutex_lock(&mutex);
    for (int step = 1; step <= steps; step++) {
        while (asked < step) pthread_cond_wait(&changed, &mutex);
        if (write(to_child[1], &values[step - 1], 8) != 8) wrong("the child does not listen");
        if (read(from_child[0], &values[step], 8) != 8) wrong("the child does not answer");
        answered = step;
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&mutex);
    close(to_child[1]);
    int status;
    if (waitpid(made, &status, 0) != made || status != 3 << 8) wrong("another child ended");
    return unused;
}

static void *count(void *answering) {
    double sum = 0;
    wait_for_its_end();
    for (int step = 1; step <= steps; step++) {
        pthread_mutex_lock(&mutex);
        asked = step;
        pthread_cond_broadcast(&changed);
        while (answered < step) pthread_cond_wait(&changed, &mutex);
        pthread_mutex_unlock(&mutex);
        sum += 1.0 / step;
        printf("%016lx %d %.17g %016lx\n", values[0], step, sum, values[step]);
        fflush(stdout);
        struct timespec moment = {0, 2000000};
        if (nanosleep(&moment, 0)) wrong("nanosleep");
    }
    pthread_join(*(pthread_t *)answering, 0);
    /* After a restart it has ended as well. */
    wait_for_its_end();
    exit(7);
}

int main(int argc, char **argv) {
    static pthread_t answering, counting;
    steps = argc > 1 ? atoi(argv[1]) : 100;
    values = malloc((steps + 1) * sizeof *values);
    getrandom(values, sizeof *values, 0);
    prctl(PR_SET_NAME, "first");
    if (pthread_create(&answering, 0, answer, 0)) return 1;
    if (pthread_create(&counting, 0, count, &answering)) return 1;
    pthread_exit(0);
}
