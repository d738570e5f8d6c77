// Estimates pi with a counter-based generator: the exact count is the host's.
#include "check.h"

__host__ __device__ inline uint32_t mix(uint32_t x)
{
    x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
    return x;
}

__host__ __device__ inline bool inside(uint32_t i)
{
    uint64_t x = mix(2 * i) >> 1, y = mix(2 * i + 1) >> 1;
    return x * x + y * y < (uint64_t(1) << 62);
}

__global__ void count(unsigned long long *hits, uint32_t n)
{
    unsigned mine = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        mine += inside(i);
    for (int d = 16; d; d /= 2) mine += __shfl_xor_sync(~0u, mine, d);
    if (threadIdx.x % 32 == 0) atomicAdd(hits, (unsigned long long)mine);
}

int main()
{
    const uint32_t n = 2000000;
    Device<unsigned long long> hits(1);
    CUDA(cudaMemset(hits, 0, 8));
    count<<<64, 256>>>(hits, n);
    unsigned long long got = hits.host()[0], want = 0;
    for (uint32_t i = 0; i < n; i++) want += inside(i);
    REQUIRE(got == want);
    REQUIRE(std::fabs(4.0 * got / n - M_PI) < 0.01);
    OK("pi about %.4f", 4.0 * got / n);
}
