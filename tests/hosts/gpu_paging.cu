// More managed memory than the device has: two vectors that are together twice as large, and four
// parts of another that are used in turns, so that at any moment some blocks are on the device and
// some in host memory. Kernels, the host, copies and other allocations of device memory follow each
// other; each step compares what it touches with a plain copy, the last all of it. Prints a nonce,
// drawn at its start, with each step, as steps.c does.
// Usage: gpu_paging STEPS MILLISECONDS [MIB of the device]
#include "steps.h"
#include <algorithm>
#include <cstring>

constexpr uint32_t PAGE = 1024; // words

__host__ __device__ inline uint32_t next(uint32_t x)
{
    x ^= x << 13;
    x ^= x >> 17;
    return x ^ x << 5;
}

// CRUM's program: a product of two vectors, of which the device has one at most.
__global__ void dot(const uint32_t *a, const uint32_t *b, size_t n, unsigned long long *sum)
{
    unsigned long long own = 0;
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        own += (unsigned long long)a[i] * b[i];
    atomicAdd(sum, own);
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

template <class T> static T *managed(size_t n)
{
    T *p;
    CUDA(cudaMallocManaged(&p, n * sizeof(T)));
    return p;
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    const size_t mib = argc > 3 ? atoi(argv[3]) : 64;
    // Not whole blocks, so that ends are met as well.
    const size_t n = (mib << 18) - 777, quarter = (mib << 16) - 5;
    const uint32_t piece = 4 * PAGE + 3;
    uint32_t *a = managed<uint32_t>(n), *b = managed<uint32_t>(n), *parts[4];
    unsigned long long *sum = managed<unsigned long long>(1);
    std::vector<uint32_t> plain_a(n), plain_b(n), plain[4];
    for (size_t i = 0; i < n; i++) {
        a[i] = plain_a[i] = next(i * 2654435761u + 1);
        b[i] = plain_b[i] = next(i * 2246822519u + 7);
    }
    for (int p = 0; p < 4; p++) {
        parts[p] = managed<uint32_t>(quarter);
        plain[p].resize(quarter);
        for (size_t i = 0; i < quarter; i++) parts[p][i] = plain[p][i] = uint32_t(i) * 3 + p;
    }
    auto product = [&](uint32_t number) {
        unsigned long long expected = 0;
        for (size_t i = 0; i < n; i++) expected += (unsigned long long)plain_a[i] * plain_b[i];
        *sum = 0;
        dot<<<8, 128>>>(a, b, n, sum);
        CUDA(cudaDeviceSynchronize());
        if (*sum != expected) wrong(steps, number, "the product", 0);
    };
    product(0);
    uint32_t x = 1;
    for (uint32_t number = 1; number <= steps.count; number++) {
        // The parts come to the device in turns, and push each other out.
        const int p = number % 4;
        const size_t at = size_t(number) * 7919 % (quarter - piece);
        change<<<(piece + 255) / 256, 256>>>(parts[p] + at, piece, number);
        for (size_t i = at; i < at + piece; i++) plain[p][i] = next(plain[p][i] + number);
        // A piece of a vector as well, in the same moment.
        const size_t from = size_t(number) * 104729 % (n - piece);
        change<<<(piece + 255) / 256, 256>>>(a + from, piece, number);
        for (size_t i = from; i < from + piece; i++) plain_a[i] = next(plain_a[i] + number);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < 40; i++) {
            x = next(x);
            if (a[x % n] != plain_a[x % n]) wrong(steps, number, "a", x % n);
            if (b[x % n] != plain_b[x % n]) wrong(steps, number, "b", x % n);
            if (i % 2) b[x % n] = plain_b[x % n] = x;
            const int q = i % 4;
            if (parts[q][x % quarter] != plain[q][x % quarter]) wrong(steps, number, "a part", x % quarter);
            if (i % 3 == 0) parts[q][x % quarter] = plain[q][x % quarter] = x;
        }
        if (number % 5 == 0) {
            // Other memory takes most of the device, and managed memory gives way.
            void *other;
            const size_t bytes = (mib << 20) / 8 * 5;
            CUDA(cudaMalloc(&other, bytes));
            CUDA(cudaMemset(other, 0x5a, bytes));
            CUDA(cudaMemcpy(a + 11, (char *)other + 3000, 8000, cudaMemcpyDefault));
            std::memset(plain_a.data() + 11, 0x5a, 8000);
            CUDA(cudaFree(other));
        }
        if (number % 7 == 0) {
            CUDA(cudaMemcpy(b + 5000, parts[p] + 100, 3 << 19, cudaMemcpyDefault));
            std::memcpy(plain_b.data() + 5000, plain[p].data() + 100, 3 << 19);
        }
        if (number % 40 == 0) product(number);
        steps.done(number);
        steps.rest();
    }
    // What neither the device nor the host has is refused, and leaves everything as it was.
    void *none;
    EXPECT(cudaErrorMemoryAllocation, cudaMallocManaged(&none, size_t(1) << 45));
    EXPECT(cudaErrorMemoryAllocation, cudaMalloc(&none, size_t(1) << 45));
    CUDA(cudaDeviceSynchronize());
    product(steps.count);
    for (size_t i = 0; i < n; i++)
        if (a[i] != plain_a[i]) wrong(steps, steps.count, "a", i);
    for (size_t i = 0; i < n; i++)
        if (b[i] != plain_b[i]) wrong(steps, steps.count, "b", i);
    for (int p = 0; p < 4; p++) {
        for (size_t i = 0; i < quarter; i++)
            if (parts[p][i] != plain[p][i]) wrong(steps, steps.count, "a part", i);
        CUDA(cudaFree(parts[p]));
    }
    CUDA(cudaFree(a));
    CUDA(cudaFree(b));
    // All of the device is free again.
    void *most;
    CUDA(cudaMalloc(&most, (mib << 20) / 8 * 7));
    return steps.well();
}
