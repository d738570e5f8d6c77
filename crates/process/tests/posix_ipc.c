// Parent and child that share what POSIX names: shared memory, semaphores and message queues.
// Nothing is held open that need not be: the child opens the memory by its name at each step.
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define REQUIRE(what) do { if (!(what)) wrong(__LINE__, #what); } while (0)

enum { BYTES = 3 * 4096, WAITING = 5 };

static void wrong(int line, const char *what) {
    dprintf(1, "wrong: line %d: %s (errno %d)\n", line, what, errno);
    kill(0, SIGKILL);
    _exit(1);
}

static char memory_name[64], go_name[64], back_name[64], queue_name[64];
static volatile uint64_t *words;
static sem_t *go, *back, *inside;
static mqd_t sender, receiver, nameless;

static volatile uint64_t *map(int flags) {
    int fd = shm_open(memory_name, O_RDWR | flags, 0640);
    REQUIRE(fd >= 0);
    if (flags) REQUIRE(ftruncate(fd, BYTES) == 0);
    struct stat status;
    REQUIRE(fstat(fd, &status) == 0 && status.st_size == BYTES && (status.st_mode & 0777) == 0640);
    void *at = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    REQUIRE(at != MAP_FAILED && close(fd) == 0);
    return at;
}

static const unsigned priorities[WAITING] = {3, 9, 3, 0, 9};

static void setup(const char *nonce) {
    snprintf(memory_name, 64, "/kedge-test-memory-%s", nonce);
    snprintf(go_name, 64, "/kedge-test-go-%s", nonce);
    snprintf(back_name, 64, "/kedge-test-back-%s", nonce);
    snprintf(queue_name, 64, "/kedge-test-queue-%s", nonce);
    words = map(O_CREAT | O_EXCL);
    go = sem_open(go_name, O_CREAT | O_EXCL, 0600, 0);
    back = sem_open(back_name, O_CREAT | O_EXCL, 0600, 0);
    inside = (sem_t *)&words[64];
    REQUIRE(go != SEM_FAILED && back != SEM_FAILED && sem_init(inside, 1, 2) == 0);
    struct mq_attr limits = {.mq_maxmsg = 8, .mq_msgsize = 300};
    receiver = mq_open(queue_name, O_CREAT | O_EXCL | O_RDONLY, 0600, &limits);
    sender = mq_open(queue_name, O_WRONLY | O_NONBLOCK);
    REQUIRE(receiver >= 0 && sender >= 0);
    nameless = mq_open("/kedge-test-nameless", O_CREAT | O_RDWR | O_NONBLOCK, 0600, &limits);
    REQUIRE(nameless >= 0 && mq_unlink("/kedge-test-nameless") == 0);
    for (char i = 0; i < WAITING; i++) REQUIRE(mq_send(nameless, &i, 1, priorities[(int)i]) == 0);
}

static void child(void) {
    for (;;) {
        uint64_t told[1];
        char buffer[300];
        unsigned priority;
        REQUIRE(mq_receive(receiver, buffer, sizeof buffer, &priority) == 8 && priority == 4);
        memcpy(told, buffer, 8);
        REQUIRE(sem_wait(go) == 0);
        volatile uint64_t *mine = map(0);
        REQUIRE(mine[0] == told[0]);
        if (told[0] == 0) exit(5);
        mine[1024] = told[0] + 1;
        REQUIRE(munmap((void *)mine, BYTES) == 0);
        REQUIRE(sem_post(inside) == 0 && sem_post(back) == 0);
    }
}

static void tell(uint64_t value) {
    words[0] = value;
    REQUIRE(mq_send(sender, (char *)&value, 8, 4) == 0);
    nanosleep(&(struct timespec){0, 1500000}, 0);
    REQUIRE(sem_post(go) == 0);
}

static void step_of(uint64_t value) {
    tell(value);
    REQUIRE(sem_wait(back) == 0 && sem_wait(inside) == 0 && words[1024] == value + 1);
    int count;
    REQUIRE(sem_getvalue(inside, &count) == 0 && count == 2);
    struct mq_attr found;
    REQUIRE(mq_getattr(nameless, &found) == 0 && found.mq_curmsgs == WAITING && found.mq_flags == O_NONBLOCK);
    REQUIRE(found.mq_maxmsg == 8 && found.mq_msgsize == 300);
    mqd_t again = mq_open(queue_name, O_RDONLY);
    REQUIRE(again >= 0 && mq_close(again) == 0);
}

static void finish(pid_t other) {
    tell(0);
    int status;
    REQUIRE(waitpid(other, &status, 0) == other && WIFEXITED(status) && WEXITSTATUS(status) == 5);
    const char order[WAITING] = {1, 4, 0, 2, 3};
    for (int i = 0; i < WAITING; i++) {
        char buffer[300];
        unsigned priority;
        REQUIRE(mq_receive(nameless, buffer, sizeof buffer, &priority) == 1);
        REQUIRE(buffer[0] == order[i] && priority == priorities[(int)order[i]]);
    }
    REQUIRE(shm_unlink(memory_name) == 0 && sem_unlink(go_name) == 0 && sem_unlink(back_name) == 0);
    REQUIRE(mq_unlink(queue_name) == 0);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    uint64_t nonce;
    getrandom(&nonce, sizeof nonce, 0);
    nonce |= 1;
    char text[20];
    snprintf(text, sizeof text, "%016lx", nonce);
    setpgid(0, 0);
    setup(text);
    pid_t other = fork();
    if (other == 0) child();
    uint64_t value = nonce;
    double sum = 0;
    for (int step = 1; step <= steps; step++) {
        sum += 1.0 / step;
        value = value * 6364136223846793005u + 1;
        step_of(value);
        printf("%016lx %d %.17g %016lx\n", nonce, step, sum, value);
        fflush(stdout);
    }
    finish(other);
    return 7;
}
