// Counts steps as step.c does, and uses kernel AIO in each: contexts whose completions wait unread,
// whose rings wrap, which it reaps by itself as libaio does, and which a thread waits on.
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct ring {
    unsigned id, nr;
    _Atomic unsigned head, tail;
    unsigned magic, compat, incompat, header;
    struct io_event events[];
};

static int file;

static void wrong(const char *what) {
    printf("wrong %s: %s\n", what, strerror(errno));
    fflush(stdout);
    _exit(9);
}

static aio_context_t set_up(unsigned requests) {
    aio_context_t context = 0;
    if (syscall(SYS_io_setup, requests, &context)) wrong("io_setup");
    return context;
}

// Writes the number `data` to its place in the file, by a request that tells it as its own; 0 if
// there is no room for another.
static int submit(aio_context_t context, uint64_t data) {
    static _Thread_local uint64_t value;
    value = data;
    struct iocb request = {.aio_data = data, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_fildes = file};
    request.aio_buf = (uintptr_t)&value;
    request.aio_nbytes = sizeof value;
    request.aio_offset = data % 512 * sizeof value;
    struct iocb *requests[] = {&request};
    long done = syscall(SYS_io_submit, context, 1L, requests);
    if (done < 0 && errno == EAGAIN) return 0;
    if (done != 1) wrong("io_submit");
    return 1;
}

static void check(const struct io_event *event, uint64_t data) {
    if (event->data != data || event->res != sizeof data || event->res2) {
        printf("wrong: %llu of %lu, result %lld\n", (unsigned long long)event->data, data, (long long)event->res);
        fflush(stdout);
        _exit(9);
    }
}

// The next one must be that of `data`.
static void reap(aio_context_t context, uint64_t data) {
    struct io_event event;
    if (syscall(SYS_io_getevents, context, 1L, 1L, &event, 0) != 1) wrong("io_getevents");
    check(&event, data);
}

// The same out of the ring itself.
static void reap_by_itself(aio_context_t context, uint64_t data) {
    struct ring *ring = (struct ring *)context;
    unsigned head = ring->head;
    if (ring->magic != 0xa10a10a1) wrong("magic");
    if (head == ring->tail) wrong("empty ring");
    check(&ring->events[head], data);
    ring->head = (head + 1) % ring->nr;
}

static aio_context_t waited_for;
static sem_t heard;

// Waits without an end in io_getevents: no stop may be seen there.
static void *wait_for_events(void *unused) {
    for (uint64_t next = 1;; next++) {
        reap(waited_for, next);
        sem_post(&heard);
    }
    return unused;
}

// Fills a context, in which `first` to `last` wait already, until it takes no more: nothing is
// lost.
static void fill(aio_context_t context, uint64_t first, uint64_t last) {
    while (submit(context, last + 1)) last++;
    for (; first <= last; first++) reap(context, first);
    struct io_event event;
    struct timespec none = {0, 0};
    if (syscall(SYS_io_getevents, context, 0L, 1L, &event, &none) != 0) wrong("end of the ring");
    if (syscall(SYS_io_destroy, context)) wrong("io_destroy");
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    char name[] = "/tmp/kedge-test-aio-XXXXXX";
    pthread_t thread;
    uint64_t *nonce = malloc(1 << 20), submitted = 0, reaped = 0;
    double sum = 0;
    getrandom(nonce, sizeof *nonce, 0);
    file = mkostemp(name, O_CLOEXEC);
    if (file < 0) wrong("file");
    unlink(name);
    aio_context_t lagging = set_up(8), own = set_up(64), idle = set_up(1000), large = set_up(4000);
    waited_for = set_up(1);
    sem_init(&heard, 0, 0);
    if (pthread_create(&thread, 0, wait_for_events, 0)) wrong("thread");
    for (uint64_t data = 1; data <= 5; data++) submit(idle, data);
    for (int step = 1; step <= steps; step++) {
        char line[128];
        for (int i = 0; i < 3; i++) submit(lagging, ++submitted);
        while (submitted - reaped > nonce[0] % 6) reap(lagging, ++reaped);
        submit(own, step);
        if (step > 2) reap_by_itself(own, step - 2);
        // Thousands go through this one, and some wait always.
        for (int i = 1; i <= 40; i++) submit(large, step * 40 + i);
        for (int i = 1; i <= 40 && step > 1; i++) reap(large, (step - 1) * 40 + i);
        submit(waited_for, step);
        while (sem_wait(&heard))
            if (errno != EINTR) wrong("sem_wait");
        uint64_t written;
        if (pread(file, &written, 8, step % 512 * 8) != 8) wrong("pread");
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum, nonce[step]);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        if (nanosleep(&moment, 0)) return 3;
    }
    fill(lagging, reaped + 1, submitted);
    fill(idle, 1, 5);
    fill(large, steps * 40 + 1, steps * 40 + 40);
    return 7;
}
