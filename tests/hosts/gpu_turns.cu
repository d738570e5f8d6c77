// Runs kernels of so many rounds of work, some at a time, and prints a line each time that they are
// over. Usage: gpu_turns ROUNDS AHEAD TIMES
#include "../programs/check.h"
#include <cstdlib>

__global__ void work(unsigned *out, unsigned rounds)
{
    unsigned value = threadIdx.x + blockIdx.x;
    for (unsigned i = 0; i < rounds; i++) value = value * 1664525u + 1013904223u;
    out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

int main(int argc, char **argv)
{
    if (argc < 4) return 2;
    unsigned rounds = strtoul(argv[1], nullptr, 10), ahead = strtoul(argv[2], nullptr, 10);
    const unsigned blocks = 16, threads = 32;
    unsigned *out;
    CUDA(cudaMalloc(&out, blocks * threads * sizeof *out));
    for (unsigned long times = strtoul(argv[3], nullptr, 10); times > 0; times--) {
        for (unsigned i = 0; i < ahead; i++) work<<<blocks, threads>>>(out, rounds);
        CUDA(cudaDeviceSynchronize());
        std::printf("over\n");
        std::fflush(stdout);
    }
    return 0;
}
