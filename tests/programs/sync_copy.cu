// A synchronous copy from pageable memory: what its stream was given before is over when it
// returns, and its bytes are there for streams that do not order with it; an asynchronous one has
// read its source when it returns.
#include "check.h"

static __device__ unsigned long long now()
{
    unsigned long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
}

// Takes a while, and says on the host that it is over.
__global__ void slow(volatile int *over, int value)
{
    for (unsigned long long begin = now(); now() - begin < 20000000;) {}
    *over = value;
}

__global__ void add_up(const int *values, int count, long long *sum)
{
    long long all = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) all += values[i];
    atomicAdd((unsigned long long *)sum, (unsigned long long)all);
}

int main()
{
    int *over;
    CUDA(cudaHostAlloc(&over, 64, cudaHostAllocMapped));
    volatile int *seen = over;
    *seen = 0;
    cudaStream_t beside;
    CUDA(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking));
    Device<long long> sum(1);
    PRELOAD(slow);
    PRELOAD(add_up);
    int round = 0;
    for (size_t count : {4, 4096, 100000, 1000000}) {
        Device<int> device(count);
        CUDA(cudaMemset(device, 0, count * sizeof(int)));
        CUDA(cudaMemset(sum, 0, sizeof(long long)));
        std::vector<int> values(count);
        long long expected = 0;
        for (size_t i = 0; i < count; i++) expected += values[i] = int(i % 1000) + 1;
        CUDA(cudaDeviceSynchronize());

        slow<<<1, 1>>>(over, ++round);
        CUDA(cudaMemcpy(device, values.data(), count * sizeof(int), cudaMemcpyHostToDevice));
        REQUIRE(*seen == round);
        add_up<<<1, 256, 0, beside>>>(device, int(count), sum);
        CUDA(cudaStreamSynchronize(beside));
        REQUIRE(sum.host()[0] == expected);

        // By rows, into rows that are further apart.
        int rows = 4, width = int(count / 4 * sizeof(int));
        Device<char> pitched(size_t(rows) * (width + 64));
        slow<<<1, 1>>>(over, ++round);
        CUDA(cudaMemcpy2D(pitched, width + 64, values.data(), width, width, rows, cudaMemcpyHostToDevice));
        REQUIRE(*seen == round);

        // The source may change as soon as an asynchronous copy returns.
        CUDA(cudaMemset(sum, 0, sizeof(long long)));
        slow<<<1, 1>>>(over, ++round);
        CUDA(cudaMemcpyAsync(device, values.data(), count * sizeof(int), cudaMemcpyHostToDevice, 0));
        for (int &value : values) value = -1;
        add_up<<<1, 256>>>(device, int(count), sum);
        REQUIRE(sum.host()[0] == expected && *seen == round);
    }
    OK("%d copies behind kernels", round);
}
