// Bitonic sort: short strides in shared memory, long ones in global memory.
#include "check.h"
#include <algorithm>

const int Block = 512;

__device__ void order(unsigned &a, unsigned &b, bool up)
{
    if ((a > b) == up) {
        unsigned t = a;
        a = b, b = t;
    }
}

__global__ void sort_shared(unsigned *data, int from, int size)
{
    __shared__ unsigned s[2 * Block];
    unsigned base = blockIdx.x * 2 * Block, t = threadIdx.x;
    s[t] = data[base + t], s[t + Block] = data[base + t + Block];
    for (int k = from; k <= size; k *= 2)
        for (int j = min(k / 2, Block); j > 0; j /= 2) {
            __syncthreads();
            unsigned i = 2 * t - (t & (j - 1));
            order(s[i], s[i + j], ((base + i) & k) == 0);
        }
    __syncthreads();
    data[base + t] = s[t], data[base + t + Block] = s[t + Block];
}

__global__ void merge_global(unsigned *data, int j, int k)
{
    unsigned t = blockIdx.x * blockDim.x + threadIdx.x, i = 2 * t - (t & (j - 1));
    order(data[i], data[i + j], (i & k) == 0);
}

int main()
{
    const int n = 1 << 15;
    Random random(11);
    std::vector<unsigned> in(n);
    for (auto &x : in) x = random.next();
    Device<unsigned> data(in);
    sort_shared<<<n / (2 * Block), Block>>>(data, 2, 2 * Block);
    for (int k = 4 * Block; k <= n; k *= 2) {
        for (int j = k / 2; j > Block; j /= 2) merge_global<<<n / (2 * Block), Block>>>(data, j, k);
        sort_shared<<<n / (2 * Block), Block>>>(data, k, k);
    }
    CUDA(cudaGetLastError());
    auto got = data.host();
    std::sort(in.begin(), in.end());
    REQUIRE(got == in);
    OK("%d keys", n);
}
