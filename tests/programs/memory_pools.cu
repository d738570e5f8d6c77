// cudaMallocAsync: reuse in stream order, pool attributes, a pool of one's own.
#include "check.h"

__global__ void fill(int *p, int n, int v)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = v + i;
}

int main()
{
    int supported;
    CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolsSupported, 0));
    REQUIRE(supported);
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    const int n = 10000;
    std::vector<int> got(n);
    for (int round = 0; round < 50; round++) {
        int *a, *b;
        CUDA(cudaMallocAsync(&a, n * 4, s));
        fill<<<(n + 255) / 256, 256, 0, s>>>(a, n, round);
        CUDA(cudaMallocAsync(&b, n * 4, s));
        REQUIRE(a != b);
        CUDA(cudaMemcpyAsync(b, a, n * 4, cudaMemcpyDeviceToDevice, s));
        CUDA(cudaFreeAsync(a, s));
        CUDA(cudaMemcpyAsync(got.data(), b, n * 4, cudaMemcpyDeviceToHost, s));
        CUDA(cudaFreeAsync(b, s));
        CUDA(cudaStreamSynchronize(s));
        for (int i = 0; i < n; i += 97) REQUIRE(got[i] == round + i);
    }
    cudaMemPool_t pool, mine;
    CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
    uint64_t threshold = 1 << 30, used;
    CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold));
    CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(used == 0);
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.location.type = cudaMemLocationTypeDevice;
    CUDA(cudaMemPoolCreate(&mine, &props));
    int *p;
    CUDA(cudaMallocFromPoolAsync(&p, 1 << 20, mine, s));
    CUDA(cudaMemPoolGetAttribute(mine, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(used >= 1 << 20);
    CUDA(cudaFreeAsync(p, s));
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaMemPoolTrimTo(mine, 0));
    CUDA(cudaMemPoolDestroy(mine));
    // The synchronous free takes what the asynchronous allocation gave.
    CUDA(cudaMallocAsync(&p, 4096, s));
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaFree(p));
    OK("50 rounds");
}
