// Counts steps on all of a large allocation: each adds one to every word, and the sum of all of
// them is compared with what it must be. Prints each step with the milliseconds since 1970. Usage:
// gpu_sum GIB STEPS MILLISECONDS
#include "../programs/check.h"
#include <cstdint>
#include <cstdlib>
#include <time.h>

typedef unsigned long long Word;

__global__ void fill(Word *words, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x)
        words[i] = i * 0x9e3779b97f4a7c15ull;
}

__global__ void step(Word *words, size_t n, Word more, Word *sum)
{
    Word mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (size_t)blockDim.x) {
        words[i] += more;
        mine += words[i];
    }
    atomicAdd(sum, mine);
}

static long long now()
{
    timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    return at.tv_sec * 1000LL + at.tv_nsec / 1000000;
}

int main(int argc, char **argv)
{
    size_t gib = argc > 1 ? strtoul(argv[1], nullptr, 10) : 1;
    int steps = argc > 2 ? atoi(argv[2]) : 100, between = argc > 3 ? atoi(argv[3]) : 10;
    // 0 GiB: 16 MiB, for devices in software.
    size_t n = (gib ? gib << 30 : 16 << 20) / sizeof(Word);
    Word *words, *sum, total, first;
    CUDA(cudaMalloc(&words, n * sizeof *words));
    CUDA(cudaMalloc(&sum, sizeof *sum));
    fill<<<2048, 256>>>(words, n);
    for (int number = 0; number <= steps; number++) {
        CUDA(cudaMemset(sum, 0, sizeof *sum));
        step<<<2048, 256>>>(words, n, number > 0, sum);
        CUDA(cudaMemcpy(&total, sum, sizeof total, cudaMemcpyDeviceToHost));
        if (number == 0) first = total;
        if (total != first + (Word)number * n) {
            std::printf("step %d is wrong\n", number);
            return 1;
        }
        std::printf("%d %lld\n", number, now());
        std::fflush(stdout);
        timespec time = {between / 1000, (between % 1000) * 1000000L};
        nanosleep(&time, nullptr);
    }
    std::printf("well\n");
    return 0;
}
