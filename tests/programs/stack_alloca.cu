// Stack memory whose size is known late: alloca in kernels, in functions that recurse, in loops,
// and too much of it.
#include "check.h"
#include <alloca.h>

// Sums 1 to n, each level with an array of its own of n elements.
__device__ __noinline__ int triangle(int n)
{
    int *own = (int *)alloca(n * sizeof(int));
    for (int i = 0; i < n; i++) own[i] = n + i;
    int below = n > 1 ? triangle(n - 1) : 0;
    for (int i = 0; i < n; i++)
        if (own[i] != n + i) return -1000000;
    return own[0] + below;
}

__global__ void kernel(int *out, int depth)
{
    int size = threadIdx.x % depth + 1;
    unsigned sum = 0;
    for (int round = 0; round < 3; round++) {
        int *a = (int *)alloca(size * sizeof(int));
        for (int i = 0; i < size; i++) a[i] = i * (round + 1) + threadIdx.x;
        if (threadIdx.x & 1) sum += triangle(size);
        for (int i = size - 1; i >= 0; i--) sum = sum * 31 + a[i];
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = (int)sum;
}

__global__ void greedy(char *out, size_t bytes)
{
    char *a = (char *)alloca(bytes);
    for (size_t i = 0; i < bytes; i += 512) a[i] = (char)i;
    *out = a[bytes - 512];
}

int main()
{
    const int threads = 96, blocks = 3, depth = 7;
    Device<int> out(threads * blocks);
    kernel<<<blocks, threads>>>(out, depth);
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    auto got = out.host();
    for (int at = 0; at < threads * blocks; at++) {
        int t = at % threads, size = t % depth + 1;
        unsigned sum = 0;
        for (int round = 0; round < 3; round++) {
            if (t & 1) sum += size * (size + 1) / 2;
            for (int i = size - 1; i >= 0; i--) sum = sum * 31 + i * (round + 1) + t;
        }
        REQUIRE(got[at] == (int)sum);
    }
    Device<char> byte(1);
    CUDA(cudaDeviceSetLimit(cudaLimitStackSize, 64 << 10));
    greedy<<<1, 32>>>(byte, 48 << 10);
    CUDA(cudaDeviceSynchronize());
    OK("%d threads, each with arrays of %d sizes", threads * blocks, depth);
}
