// Counts steps as step.c does. Requests of io_uring to a file are always under way: reads past the
// page cache (O_DIRECT) where the file system has them, and ones that the kernel's own threads do.
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define BLOCKS 64
#define UNDER_WAY 8

static void wrong(const char *what) {
    printf("wrong %s: %s\n", what, strerror(errno));
    fflush(stdout);
    _exit(9);
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 100;
    // Not in /tmp: that may be in memory.
    char name[] = "/var/tmp/kedge-test-ring-XXXXXX";
    uint64_t *nonce = malloc(1 << 20), *blocks = aligned_alloc(BLOCK, BLOCK * BLOCKS);
    double sum = 0;
    getrandom(nonce, sizeof *nonce, 0);
    int file = mkostemp(name, O_DIRECT | O_CLOEXEC);
    if (file < 0) file = mkostemp(strcpy(name, "/var/tmp/kedge-test-ring-XXXXXX"), O_CLOEXEC);
    if (file < 0) wrong("file");
    unlink(name);
    for (int block = 0; block < BLOCKS; block++) blocks[block * BLOCK / 8] = block * 11 + 1;
    if (write(file, blocks, BLOCK * BLOCKS) != BLOCK * BLOCKS) wrong("write");

    struct io_uring_params p = {0};
    int ring = syscall(SYS_io_uring_setup, 16, &p), both = PROT_READ | PROT_WRITE;
    if (ring < 0) wrong("setup");
    char *at = mmap(0, p.sq_off.array + 64, both, MAP_SHARED, ring, IORING_OFF_SQ_RING);
    struct io_uring_sqe *requests = mmap(0, 4096, both, MAP_SHARED, ring, IORING_OFF_SQES);
    if (at == MAP_FAILED || requests == MAP_FAILED) wrong("mmap");
    _Atomic unsigned *sq_tail = (void *)(at + p.sq_off.tail), *cq_head = (void *)(at + p.cq_off.head);
    _Atomic unsigned *cq_tail = (void *)(at + p.cq_off.tail);
    unsigned *array = (void *)(at + p.sq_off.array), tail = 0;
    struct io_uring_cqe *completions = (void *)(at + p.cq_off.cqes);
    for (unsigned i = 0; i < p.sq_entries; i++) array[i] = i;
    int is_free[UNDER_WAY];
    for (int i = 0; i < UNDER_WAY; i++) is_free[i] = 1;
    for (int step = 1; step <= steps;) {
        for (int slot = 0; slot < UNDER_WAY; slot++) {
            if (!is_free[slot]) continue;
            struct io_uring_sqe *request = &requests[tail++ % p.sq_entries];
            unsigned block = tail % BLOCKS;
            memset(request, 0, sizeof *request);
            request->opcode = IORING_OP_READ;
            request->fd = file;
            request->flags = slot % 2 ? IOSQE_ASYNC : 0;
            request->addr = (uintptr_t)(blocks + slot * BLOCK / 8);
            request->len = BLOCK;
            request->off = (uint64_t)block * BLOCK;
            request->user_data = block << 8 | slot;
            blocks[slot * BLOCK / 8] = is_free[slot] = 0;
            *sq_tail = tail;
            if (syscall(SYS_io_uring_enter, ring, 1, 0, 0, 0, 0) != 1) wrong("submit");
        }
        if (syscall(SYS_io_uring_enter, ring, 0, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) wrong("wait");
        for (unsigned head = *cq_head; head != *cq_tail; *cq_head = ++head) {
            struct io_uring_cqe *completion = &completions[head % p.cq_entries];
            unsigned slot = completion->user_data & 0xff, block = completion->user_data >> 8;
            errno = -completion->res;
            if (completion->res != BLOCK) wrong("result");
            errno = 0;
            if (is_free[slot] || blocks[slot * BLOCK / 8] != block * 11 + 1) wrong("block");
            is_free[slot] = 1;
        }
        static struct timespec last, now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec == last.tv_sec && now.tv_nsec - last.tv_nsec < 2000000) continue;
        last = now;
        char line[128];
        sum += 1.0 / step;
        nonce[step] = nonce[step - 1] * 6364136223846793005u + 1;
        int length = snprintf(line, sizeof line, "%016lx %d %.17g %016lx\n", nonce[0], step, sum,
                              nonce[step]);
        if (write(1, line, length) != length) return 2;
        step++;
    }
    return 7;
}
