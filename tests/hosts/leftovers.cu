// `fill MIB`: fills that much device memory with a pattern, says `filled`, and waits to be ended.
// `look MIB`: counts the pattern's words in fresh device memory; memory of others must have been
// scrubbed. It tells also how long it took to get that memory.
// `cost MIB ROUNDS`: gets that much memory, overwrites it and gives it back, again and again:
// milliseconds for each, as JSON. What is overwritten is what would have to be, were memory
// scrubbed by whoever gets it.
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

using Clock = std::chrono::steady_clock;

static double since(Clock::time_point begin) { return std::chrono::duration<double, std::milli>(Clock::now() - begin).count(); }

static void list(const char *name, const double *values, int count, const char *end)
{
    printf("\"%s\": [", name);
    for (int i = 0; i < count; i++) printf("%s%.4f", i ? ", " : "", values[i]);
    printf("]%s", end);
}

static int cost(size_t bytes, int rounds)
{
    const int most = 64;
    static double get[most], zero[most], give[most];
    if (cudaFree(nullptr) != cudaSuccess || rounds < 1 || rounds > most) return 2;
    for (int i = 0; i < rounds; i++) {
        unsigned *p;
        auto begin = Clock::now();
        if (cudaMalloc(&p, bytes) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 2;
        get[i] = since(begin), begin = Clock::now();
        if (cudaMemset(p, 0, bytes) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 3;
        zero[i] = since(begin), begin = Clock::now();
        if (cudaFree(p) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess) return 3;
        give[i] = since(begin);
    }
    printf("{");
    list("allocate_ms", get, rounds, ", "), list("zero_ms", zero, rounds, ", "), list("free_ms", give, rounds, "}\n");
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 3 && !strcmp(argv[1], "cost")) return cost((size_t)atoll(argv[2]) << 20, atoi(argv[3]));
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
