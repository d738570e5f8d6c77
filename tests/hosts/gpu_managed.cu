// Steps on managed memory that the host and kernels change in turn, a little of it each, so that at
// any moment some pages are the device's, some the host's, and some are current on both. Each step
// compares what it touches with a plain copy, the last all of it. Small allocations come and go; a
// thread touches all the time. Prints a nonce, drawn at its start, with each step, as steps.c does.
// Usage: gpu_managed STEPS MILLISECONDS [MIB]
#include "steps.h"
#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

constexpr uint32_t PAGE = 1024; // words

__host__ __device__ inline uint32_t next(uint32_t x)
{
    x ^= x << 13;
    x ^= x >> 17;
    return x ^ x << 5;
}

__global__ void change(uint32_t *words, uint32_t n, uint32_t number)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) words[i] = next(words[i] + number);
}

static void wrong(const Steps &steps, uint32_t number, const char *what, size_t at)
{
    std::printf("%08x: step %u: %s, word %zu is wrong\n", steps.nonce, number, what, at);
    std::exit(1);
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 150);
    const uint32_t n = (argc > 3 ? atoi(argv[3]) : 32) << 18, part = 20 * PAGE, hosts = 512 * PAGE;
    uint32_t *both, *own, *counted;
    CUDA(cudaMallocManaged(&both, size_t(n) * 4));
    CUDA(cudaMallocManaged(&own, size_t(hosts) * 4));
    CUDA(cudaMallocManaged(&counted, 4 * PAGE * 4));
    std::vector<uint32_t> plain(n), plain_own(hosts);
    std::fill(own, own + hosts, 0);
    std::fill(counted, counted + 4 * PAGE, 0);
    for (uint32_t i = 0; i < n; i++) both[i] = plain[i] = next(i * 2654435761u + 1);
    change<<<n / 256, 256>>>(both, n, 0);
    for (uint32_t i = 0; i < n; i++) plain[i] = next(plain[i]);

    // Its pages are closed by each launch.
    std::atomic<bool> over(false);
    uint32_t seen = 0;
    std::thread thread([&] {
        volatile uint32_t *words = counted;
        while (!over) {
            if (words[PAGE] != seen || words[2 * PAGE + 5]) wrong(steps, 0, "a thread's", PAGE);
            words[PAGE] = ++seen;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    });
    uint32_t x = 1;
    for (uint32_t number = 1; number <= steps.count; number++) {
        uint32_t at = number * 7919u % (n / part) * part;
        change<<<(part + 255) / 256, 256>>>(both + at, part, number);
        for (uint32_t i = at; i < at + part; i++) plain[i] = next(plain[i] + number);
        uint32_t *small;
        CUDA(cudaMallocManaged(&small, 100 * 4));
        for (int i = 0; i < 100; i++) small[i] = number;
        change<<<1, 128>>>(small, 100, number);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < 40; i++) {
            x = next(x);
            uint32_t word = x % n;
            if (both[word] != plain[word]) wrong(steps, number, "both's", word);
            if (i % 2) both[word] = plain[word] = x;
            if (own[x % hosts] != plain_own[x % hosts]) wrong(steps, number, "its own", x % hosts);
            own[x % hosts] = plain_own[x % hosts] = x;
        }
        // The kernel may have been late: nobody waits for it but a touch.
        if (small[99] != next(number + number)) wrong(steps, number, "a small one's", 99);
        CUDA(cudaFree(small));
        steps.done(number);
        steps.rest();
    }
    over = true;
    thread.join();
    for (uint32_t i = 0; i < n; i++)
        if (both[i] != plain[i]) wrong(steps, steps.count, "both's", i);
    for (uint32_t i = 0; i < hosts; i++)
        if (own[i] != plain_own[i]) wrong(steps, steps.count, "its own", i);
    if (counted[PAGE] != seen) wrong(steps, steps.count, "a thread's", PAGE);
    return steps.well();
}
