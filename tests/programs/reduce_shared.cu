// Sums through shared memory: a tree of barriers, blocks that the size does not fill.
#include "check.h"

__global__ void sum(const int *in, long long *out, int n)
{
    extern __shared__ long long part[];
    int tid = threadIdx.x;
    long long mine = 0;
    for (int i = blockIdx.x * blockDim.x + tid; i < n; i += gridDim.x * blockDim.x) mine += in[i];
    part[tid] = mine;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (tid < half) part[tid] += part[tid + half];
        __syncthreads();
    }
    if (tid == 0) out[blockIdx.x] = part[0];
}

int main()
{
    const int n = 300007, blocks = 37;
    Random random(4);
    std::vector<int> in(n);
    long long want = 0;
    for (auto &x : in) want += x = int(random.next());
    Device<int> din(in);
    for (int threads : {32, 128, 512, 1024}) {
        Device<long long> dout(blocks);
        sum<<<blocks, threads, threads * sizeof(long long)>>>(din, dout, n);
        CUDA(cudaGetLastError());
        long long got = 0;
        for (long long x : dout.host()) got += x;
        REQUIRE(got == want);
    }
    OK("sum %lld", want);
}
