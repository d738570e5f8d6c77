// `fill MIB`: fills that much device memory with a pattern, says `filled`, and waits to be ended.
// `look MIB`: counts the pattern's words in fresh device memory; memory of others must have been scrubbed. It tells also how
// long it took to get that memory.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

static const unsigned pattern = 0x5ec2e7ed;

__global__ void write(unsigned *p, size_t n)
{
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = pattern;
}

__global__ void count(const unsigned *p, size_t n, unsigned long long *found)
{
    unsigned long long mine = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) mine += p[i] == pattern;
    if (mine) atomicAdd(found, mine);
}

int main(int argc, char **argv)
{
    bool fill = argc > 1 && !strcmp(argv[1], "fill");
    size_t n = (argc > 2 ? atoll(argv[2]) : 64) << 18;
    unsigned *p;
    unsigned long long *found, told = 0;
    if (cudaMalloc(&found, 8) != cudaSuccess) return 2;
    auto begin = std::chrono::steady_clock::now();
    if (cudaMalloc(&p, n * 4) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 2;
    double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    if (fill) write<<<256, 256>>>(p, n);
    cudaMemset(found, 0, 8);
    count<<<256, 256>>>(p, n, found);
    if (cudaMemcpy(&told, found, 8, cudaMemcpyDeviceToHost) != cudaSuccess) return 3;
    if (!fill) {
        printf("found %llu words, allocated within %.1f ms\n", told, took * 1e3);
        return told != 0;
    }
    printf("filled %llu words\n", told);
    fflush(stdout);
    char c;
    return told != n || read(0, &c, 1) < 0;
}
