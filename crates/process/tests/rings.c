// Counts steps as step.c does, and uses rings of io_uring in each, as liburing does: with its own
// copies of the counters. Completions wait unread, requests wait unsubmitted, counters wrap around
// the rings, a thread and a child that has inherited one wait for completions.
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NO_SQARRAY (1U << 16)

struct ring {
    int fd;
    unsigned entries, room;
    _Atomic unsigned *sq_head, *sq_tail, *cq_head, *cq_tail;
    unsigned *array;
    struct io_uring_sqe *requests;
    struct io_uring_cqe *completions;
    // The program's own.
    unsigned tail, seen;
};

static void wrong(const char *what) {
    printf("wrong %s: %s\n", what, strerror(errno));
    fflush(stdout);
    _exit(9);
}

static int set_up(struct ring *ring, unsigned entries, unsigned flags) {
    struct io_uring_params p = {.flags = flags};
    ring->fd = syscall(SYS_io_uring_setup, entries, &p);
    if (ring->fd < 0) return -1;
    size_t queues = p.sq_off.array + p.sq_entries * 4, cqes = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
    if (cqes > queues) queues = cqes;
    int both = PROT_READ | PROT_WRITE;
    char *at = mmap(0, queues, both, MAP_SHARED, ring->fd, IORING_OFF_SQ_RING);
    ring->requests = mmap(0, p.sq_entries * 64, both, MAP_SHARED, ring->fd, IORING_OFF_SQES);
    if (at == MAP_FAILED || ring->requests == MAP_FAILED) wrong("mmap");
    ring->entries = p.sq_entries;
    ring->room = p.cq_entries;
    ring->sq_head = (void *)(at + p.sq_off.head);
    ring->sq_tail = (void *)(at + p.sq_off.tail);
    ring->cq_head = (void *)(at + p.cq_off.head);
    ring->cq_tail = (void *)(at + p.cq_off.tail);
    ring->completions = (void *)(at + p.cq_off.cqes);
    ring->array = flags & NO_SQARRAY ? 0 : (void *)(at + p.sq_off.array);
    for (unsigned i = 0; ring->array && i < ring->entries; i++) ring->array[i] = i;
    ring->tail = ring->seen = 0;
    return 0;
}

// A request, not submitted as yet.
static struct io_uring_sqe *prepare(struct ring *ring, int what, uint64_t data) {
    if (ring->tail - *ring->sq_head >= ring->entries) {
        errno = 0;
        wrong("full ring");
    }
    struct io_uring_sqe *request = &ring->requests[ring->tail++ & (ring->entries - 1)];
    memset(request, 0, sizeof *request);
    request->opcode = what;
    request->user_data = data;
    return request;
}

static void submit(struct ring *ring) {
    unsigned count = ring->tail - *ring->sq_head;
    *ring->sq_tail = ring->tail;
    while (count > 0) {
        long done = syscall(SYS_io_uring_enter, ring->fd, count, 0, 0, 0, 0);
        if (done <= 0 && errno != EINTR) wrong("submit");
        if (done > 0) count -= done;
    }
}

// The next completion must be that of `data`, with that result; it is waited for.
static void reap(struct ring *ring, uint64_t data, int result) {
    while (*ring->cq_tail == *ring->cq_head)
        if (syscall(SYS_io_uring_enter, ring->fd, 0, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) wrong("wait");
    if (*ring->cq_head != ring->seen) wrong("head");
    struct io_uring_cqe *completion = &ring->completions[ring->seen & (ring->room - 1)];
    if (completion->user_data != data || completion->res != result) {
        printf("wrong: %llu of %lu, result %d\n", completion->user_data, data, completion->res);
        fflush(stdout);
        _exit(9);
    }
    *ring->cq_head = ++ring->seen;
}

static void do_nothing(struct ring *ring, uint64_t data) {
    prepare(ring, IORING_OP_NOP, data);
    submit(ring);
}

static void transfer(struct ring *ring, int what, int file, uint64_t *value, uint64_t data, int flags) {
    struct io_uring_sqe *request = prepare(ring, what, data);
    request->fd = file;
    request->addr = (uintptr_t)value;
    request->len = sizeof *value;
    request->off = data % 512 * sizeof *value;
    request->flags = flags;
    submit(ring);
    reap(ring, data, sizeof *value);
}

static struct ring waited_for;
static sem_t heard;

// Waits without an end in io_uring_enter: no stop may be seen there.
static void *wait_for_completions(void *unused) {
    for (uint64_t next = 1;; next++) {
        reap(&waited_for, next, 0);
        sem_post(&heard);
    }
    return unused;
}

static int asked[2], answered[2];

// A child reaps what its parent submits.
static void reap_in_a_child(struct ring *ring) {
    char byte;
    if (pipe(asked) || pipe(answered)) wrong("pipe");
    if (fork()) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint64_t next = 1; read(asked[0], &byte, 1) == 1; next++) {
        reap(ring, next, 0);
        if (write(answered[1], &byte, 1) != 1) _exit(1);
    }
    _exit(0);
}

static void tell_of(int epoll, int wanted) {
    struct epoll_event event;
    int told = epoll_wait(epoll, &event, 1, wanted ? 1000 : 0);
    if (told != wanted) wrong("epoll");
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    char name[] = "/tmp/kedge-test-rings-XXXXXX", byte = 0;
    pthread_t thread;
    struct ring lagging, files, prepared, inherited, full, plain;
    struct epoll_event event = {.events = EPOLLIN};
    uint64_t *nonce = malloc(1 << 20), submitted = 0, reaped = 0;
    double sum = 0;
    getrandom(nonce, sizeof *nonce, 0);
    int file = mkstemp(name), epoll = epoll_create1(EPOLL_CLOEXEC);
    if (file < 0 || epoll < 0) wrong("file");
    unlink(name);
    if (set_up(&lagging, 4, 0) || set_up(&files, 64, IORING_SETUP_COOP_TASKRUN) || set_up(&prepared, 8, 0)) wrong("setup");
    if (set_up(&inherited, 2, 0) || set_up(&full, 512, 0) || set_up(&waited_for, 16, 0)) wrong("setup");
    if (set_up(&plain, 128, NO_SQARRAY) && set_up(&plain, 128, 0)) wrong("setup");
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, plain.fd, &event)) wrong("epoll_ctl");
    reap_in_a_child(&inherited);
    sem_init(&heard, 0, 0);
    if (pthread_create(&thread, 0, wait_for_completions, 0)) wrong("thread");
    for (uint64_t data = 71; data <= 73; data++) prepare(&prepared, IORING_OP_NOP, data);
    *prepared.sq_tail = prepared.tail;
    prepare(&prepared, IORING_OP_NOP, 74);
    // Counters that are not a round's, and a queue that is full.
    for (int i = 0; i < 300; i++) {
        do_nothing(&full, i);
        reap(&full, i, 0);
    }
    for (int i = 0; i < 1024; i++) do_nothing(&full, i);
    for (int step = 1; step <= steps; step++) {
        char line[128];
        uint64_t value = step * 7, back = 0;
        for (int i = 0; i < 3; i++) do_nothing(&lagging, ++submitted);
        while (submitted - reaped > nonce[0] % 5) reap(&lagging, ++reaped, 0);
        transfer(&files, IORING_OP_WRITE, file, &value, step, step % 2 ? IOSQE_ASYNC : 0);
        transfer(&files, IORING_OP_READ, file, &back, step, step % 3 ? 0 : IOSQE_ASYNC);
        if (back != value) wrong("value");
        do_nothing(&waited_for, step);
        while (sem_wait(&heard))
            if (errno != EINTR) wrong("sem_wait");
        do_nothing(&inherited, step);
        if (write(asked[1], &byte, 1) != 1 || read(answered[0], &byte, 1) != 1) wrong("child");
        tell_of(epoll, 0);
        do_nothing(&plain, step);
        tell_of(epoll, 1);
        reap(&plain, step, 0);
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum, nonce[step]);
        if (write(1, line, length) != length) return 2;
        struct timespec moment = {0, 2000000};
        if (nanosleep(&moment, 0)) return 3;
    }
    submit(&prepared);
    for (uint64_t data = 71; data <= 74; data++) reap(&prepared, data, 0);
    for (int i = 0; i < 1024; i++) reap(&full, i, 0);
    while (reaped < submitted) reap(&lagging, ++reaped, 0);
    // What finds no room waits, and none is lost.
    for (int i = 0; i < 1030; i++) do_nothing(&full, i);
    for (int i = 0; i < 1024; i++) reap(&full, i, 0);
    if (syscall(SYS_io_uring_enter, full.fd, 0, 0, IORING_ENTER_GETEVENTS, 0, 0) < 0) wrong("flush");
    for (int i = 1024; i < 1030; i++) reap(&full, i, 0);
    close(asked[1]);
    return 7;
}
