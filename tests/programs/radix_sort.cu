// Least-significant-digit radix sort, 4 bits a pass, stable, with ballots for the ranks.
#include "check.h"
#include <algorithm>

const int Block = 256, Digits = 16;

__global__ void count(const unsigned *keys, unsigned *counts, int n, int shift)
{
    __shared__ unsigned bins[Digits];
    if (threadIdx.x < Digits) bins[threadIdx.x] = 0;
    __syncthreads();
    int i = blockIdx.x * Block + threadIdx.x;
    if (i < n) atomicAdd(&bins[keys[i] >> shift & 15], 1u);
    __syncthreads();
    if (threadIdx.x < Digits) counts[threadIdx.x * gridDim.x + blockIdx.x] = bins[threadIdx.x];
}

__global__ void scan_serial(unsigned *counts, int n)
{
    unsigned sum = 0;
    for (int i = 0; i < n; i++) {
        unsigned c = counts[i];
        counts[i] = sum, sum += c;
    }
}

__global__ void scatter(const unsigned *in, unsigned *out, const unsigned *starts, int n, int shift)
{
    __shared__ unsigned warps[Block / 32][Digits];
    int i = blockIdx.x * Block + threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned key = i < n ? in[i] : 0, digit = i < n ? key >> shift & 15 : Digits, rank = 0;
    for (unsigned d = 0; d < Digits; d++) {
        unsigned same = __ballot_sync(~0u, digit == d);
        if (digit == d) rank = __popc(same & ((1u << lane) - 1));
        if (lane == 0) warps[warp][d] = __popc(same);
    }
    __syncthreads();
    if (i >= n) return;
    for (int w = 0; w < warp; w++) rank += warps[w][digit];
    out[starts[digit * gridDim.x + blockIdx.x] + rank] = key;
}

int main()
{
    const int n = 40009, blocks = (n + Block - 1) / Block;
    Random random(12);
    std::vector<unsigned> in(n);
    for (auto &x : in) x = random.next();
    Device<unsigned> a(in), b(n), counts(blocks * Digits);
    for (int shift = 0; shift < 32; shift += 4) {
        unsigned *from = shift % 8 ? b : a, *to = shift % 8 ? a : b;
        count<<<blocks, Block>>>(from, counts, n, shift);
        scan_serial<<<1, 1>>>(counts, blocks * Digits);
        scatter<<<blocks, Block>>>(from, to, counts, n, shift);
    }
    CUDA(cudaGetLastError());
    auto got = a.host();
    std::sort(in.begin(), in.end());
    REQUIRE(got == in);
    OK("%d keys", n);
}
