// A freed range is not reused before the work that uses it is done, on whatever stream.
#include "check.h"

__global__ void slow_write(int *p, int n, int v)
{
    long long until = clock64() + 3000000;
    while (clock64() < until) {}
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = v;
}

__global__ void write(int *p, int n, int v)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] = v;
}

int main()
{
    const int n = 4096;
    cudaStream_t a, b;
    CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    for (int round = 0; round < 10; round++) {
        int *p, *q;
        CUDA(cudaMalloc(&p, n * 4));
        slow_write<<<1, 64, 0, a>>>(p, n, -1);
        CUDA(cudaFree(p));
        CUDA(cudaMalloc(&q, n * 4));
        write<<<1, 64, 0, b>>>(q, n, round);
        CUDA(cudaDeviceSynchronize());
        std::vector<int> got(n);
        CUDA(cudaMemcpy(got.data(), q, n * 4, cudaMemcpyDeviceToHost));
        for (int x : got) REQUIRE(x == round);
        CUDA(cudaFree(q));
    }
    for (int round = 0; round < 10; round++) {
        int *p, *q;
        CUDA(cudaMallocAsync(&p, n * 4, a));
        slow_write<<<1, 64, 0, a>>>(p, n, -1);
        CUDA(cudaFreeAsync(p, a));
        CUDA(cudaMallocAsync(&q, n * 4, b));
        write<<<1, 64, 0, b>>>(q, n, round);
        CUDA(cudaDeviceSynchronize());
        std::vector<int> got(n);
        CUDA(cudaMemcpy(got.data(), q, n * 4, cudaMemcpyDeviceToHost));
        for (int x : got) REQUIRE(x == round);
        CUDA(cudaFreeAsync(q, b));
    }
    OK("20 rounds");
}
