// Two processes that sum on their devices: a kernel of each hands its number out and waits, on the device,
// for the other's. A thread of each process carries the numbers, as collective libraries' threads do; one
// process is now and then late, so the other's kernel is often inside of the sum when nothing of the late
// one's is on its device yet. Compared with the host's sum in each step. Prints as gpu_steps does.
// Usage: gpu_allreduce STEPS MILLISECONDS
#include "../programs/check.h"
#include <cstdint>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <time.h>
#include <unistd.h>

// What a kernel and the thread that carries its numbers share: pinned memory.
struct Exchange {
    volatile uint32_t out, out_step, in, in_step;
};

__global__ void sum(uint32_t *state, volatile Exchange *exchange, uint32_t step)
{
    exchange->out = *state;
    __threadfence_system();
    exchange->out_step = step;
    while (exchange->in_step < step) {
    }
    __threadfence_system();
    *state = *state * 31 + exchange->in * 17 + step;
}

static uint32_t next(uint32_t mine, uint32_t other, uint32_t step)
{
    return mine * 31 + other * 17 + step;
}

static void wait_for(int microseconds)
{
    timespec time = {microseconds / 1000000, (microseconds % 1000000) * 1000L};
    nanosleep(&time, nullptr);
}

static void carry(volatile Exchange *exchange, int socket, int steps)
{
    for (int step = 1; step <= steps; step++) {
        while (exchange->out_step < (uint32_t)step) wait_for(50);
        __sync_synchronize();
        uint32_t mine = exchange->out, other = 0;
        if (write(socket, &mine, sizeof mine) != sizeof mine) _exit(3);
        if (read(socket, &other, sizeof other) != sizeof other) _exit(4);
        exchange->in = other;
        __sync_synchronize();
        exchange->in_step = step;
    }
}

static int rank(int number, int socket, int steps, int between, uint32_t nonce)
{
    Exchange *exchange;
    uint32_t *state, seen, host[2] = {1, 2};
    CUDA(cudaMallocHost(&exchange, sizeof *exchange));
    *exchange = Exchange{};
    CUDA(cudaMalloc(&state, sizeof *state));
    CUDA(cudaMemcpy(state, &host[number], sizeof *state, cudaMemcpyHostToDevice));
    std::thread carrier(carry, exchange, socket, steps);
    for (int step = 1; step <= steps; step++) {
        if (number == 1) wait_for(1000 * between * (step % 4));
        sum<<<1, 1>>>(state, exchange, step);
        CUDA(cudaMemcpy(&seen, state, sizeof seen, cudaMemcpyDeviceToHost));
        uint32_t before[2] = {host[0], host[1]};
        host[0] = next(before[0], before[1], step);
        host[1] = next(before[1], before[0], step);
        if (seen != host[number]) {
            std::printf("%08x: rank %d: step %d is wrong\n", nonce, number, step);
            return 1;
        }
        if (number == 0) {
            std::printf("%08x %d\n", nonce, step);
            std::fflush(stdout);
        }
    }
    carrier.join();
    return 0;
}

int main(int argc, char **argv)
{
    int steps = argc > 1 ? atoi(argv[1]) : 100, between = argc > 2 ? atoi(argv[2]) : 5;
    uint32_t nonce = 0;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 2;
    std::printf("nonce %08x\n", nonce);
    std::fflush(stdout);
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 2;
    pid_t other = fork();
    if (other == 0) return rank(1, ends[1], steps, between, nonce);
    int own = rank(0, ends[0], steps, between, nonce), status = 0;
    waitpid(other, &status, 0);
    if (own != 0 || status != 0) return 1;
    std::printf("%08x well\n", nonce);
    return 7;
}
