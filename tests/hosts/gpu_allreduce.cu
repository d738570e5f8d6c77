// Two processes that sum on their devices: a kernel of each hands its number out and waits, on the
// device, for the other's. A thread of each process carries the numbers, as collective libraries'
// threads do; one process is now and then late, so the other's kernel is often inside of the sum
// when nothing of the late one's is on its device yet. Compared with the host's sum in each step.
// Prints as gpu_steps does, by a thread that may wait for its reader: were a process to wait for
// it, the other's kernel would never end. Usage: gpu_allreduce STEPS MILLISECONDS
#include "../programs/sockets.h"
#include "steps.h"
#include <atomic>
#include <functional>
#include <sys/wait.h>
#include <thread>

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
    *state = Pair::next(*state, exchange->in, step);
}

static void wait_for(int microseconds)
{
    timespec time = {microseconds / 1000000, (microseconds % 1000000) * 1000L};
    nanosleep(&time, nullptr);
}

static void carry(volatile Exchange *exchange, int socket, uint32_t steps)
{
    for (uint32_t step = 1; step <= steps; step++) {
        while (exchange->out_step < step) wait_for(50);
        __sync_synchronize();
        uint32_t mine = exchange->out, other = 0;
        say(socket, &mine, sizeof mine);
        hear(socket, &other, sizeof other);
        exchange->in = other;
        __sync_synchronize();
        exchange->in_step = step;
    }
}

static void print(const std::atomic<uint32_t> &reached, const Steps &steps)
{
    for (uint32_t step = 1; step <= steps.count; step++) {
        while (reached < step) wait_for(50);
        steps.done(step);
    }
}

static int rank(int number, int socket, const Steps &steps)
{
    Exchange *exchange;
    uint32_t *state, seen;
    Pair host;
    CUDA(cudaMallocHost(&exchange, sizeof *exchange));
    *exchange = Exchange{};
    CUDA(cudaMalloc(&state, sizeof *state));
    CUDA(cudaMemcpy(state, &host.ranks[number], sizeof *state, cudaMemcpyHostToDevice));
    std::thread carrier(carry, exchange, socket, steps.count), printer;
    std::atomic<uint32_t> reached = 0;
    if (number == 0) printer = std::thread(print, std::cref(reached), std::cref(steps));
    for (uint32_t step = 1; step <= steps.count; step++) {
        if (number == 1) wait_for(1000 * steps.between * (step % 4));
        sum<<<1, 1>>>(state, exchange, step);
        CUDA(cudaMemcpy(&seen, state, sizeof seen, cudaMemcpyDeviceToHost));
        host.step(step);
        if (seen != host.ranks[number]) {
            std::printf("%08x: rank %d: step %u is wrong\n", steps.nonce, number, step);
            // Not by way of the threads, which wait for steps that will not come.
            std::fflush(stdout);
            _exit(1);
        }
        reached = step;
    }
    carrier.join();
    if (printer.joinable()) printer.join();
    return 0;
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) return 2;
    pid_t other = fork();
    // Who is left alone is not to wait for ever.
    close(ends[other != 0]);
    if (other == 0) return rank(1, ends[1], steps);
    int own = rank(0, ends[0], steps), status = 0;
    waitpid(other, &status, 0);
    if (own != 0 || status != 0) return 1;
    return steps.well();
}
