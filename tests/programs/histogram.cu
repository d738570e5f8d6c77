// A 256-bin histogram through shared-memory atomics, merged with global ones.
#include "check.h"

__global__ void histogram(const unsigned char *in, unsigned *bins, size_t n)
{
    __shared__ unsigned local[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
    __syncthreads();
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[in[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        if (local[i]) atomicAdd(&bins[i], local[i]);
}

int main()
{
    const size_t n = 1000003;
    Random random(7);
    std::vector<unsigned char> in(n);
    std::vector<unsigned> want(256);
    for (auto &x : in) want[x = random.next() & random.next()]++;
    Device<unsigned char> din(in);
    Device<unsigned> bins(256);
    CUDA(cudaMemset(bins, 0, 1024));
    histogram<<<40, 192>>>(din, bins, n);
    REQUIRE(bins.host() == want);
    OK("%zu bytes", n);
}
