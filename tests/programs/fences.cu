// Message passing between blocks: threadfence, volatile, the last block sums up.
#include "check.h"

__device__ unsigned arrived;

__global__ void sum(const int *in, long long *part, long long *total, int n)
{
    __shared__ long long s[128];
    __shared__ bool last;
    long long mine = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) mine += in[i];
    s[threadIdx.x] = mine;
    __syncthreads();
    for (int h = 64; h; h /= 2) {
        if (threadIdx.x < h) s[threadIdx.x] += s[threadIdx.x + h];
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        part[blockIdx.x] = s[0];
        __threadfence();
        last = atomicInc(&arrived, gridDim.x - 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        long long all = 0;
        for (int b = 0; b < gridDim.x; b++) all += ((volatile long long *)part)[b];
        *total = all;
    }
}

// Each block waits for the one before it: blocks start in order.
__global__ void chain(volatile int *baton, int *order)
{
    if (threadIdx.x == 0) {
        while (baton[blockIdx.x] == 0) {}
        order[blockIdx.x] = baton[blockIdx.x] + 1;
        __threadfence();
        baton[blockIdx.x + 1] = baton[blockIdx.x] + 1;
    }
}

int main()
{
    const int n = 100000, blocks = 50;
    std::vector<int> in(n);
    long long want = 0;
    Random random(44);
    for (auto &x : in) want += x = int(random.next()) / 2;
    Device<int> din(in), baton(blocks + 1), order(blocks);
    Device<long long> part(blocks), total(1);
    for (int round = 0; round < 3; round++) {
        sum<<<blocks, 128>>>(din, part, total, n);
        REQUIRE(total.host()[0] == want);
    }
    std::vector<int> start(blocks + 1);
    start[0] = 1;
    CUDA(cudaMemcpy(baton, start.data(), (blocks + 1) * 4, cudaMemcpyHostToDevice));
    chain<<<blocks, 32>>>(baton, order);
    auto o = order.host();
    for (int b = 0; b < blocks; b++) REQUIRE(o[b] == b + 2);
    OK("%d blocks", blocks);
}
