// Managed memory and managed variables: host and device use one address in turn.
#include "check.h"

__managed__ int total = 5;
__managed__ double table[10] = {1, 2, 3};

__global__ void work(int *p, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        p[i] = 2 * p[i] + 1;
        atomicAdd(&total, 1);
    }
    if (threadIdx.x < 10) table[threadIdx.x] += 0.5;
}

int main()
{
    const int n = 2000;
    int *p;
    CUDA(cudaMallocManaged(&p, n * sizeof(int)));
    for (int i = 0; i < n; i++) p[i] = i;
    REQUIRE(total == 5 && table[2] == 3);
    total = 100;
    for (int round = 0; round < 3; round++) {
        work<<<1, 128>>>(p, n);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < n; i++) {
            REQUIRE(p[i] == (round == 0 ? 2 * i + 1 : round == 1 ? 2 * i + 3 : 2 * i + 5));
            p[i] = i + round + 1;
        }
    }
    REQUIRE(total == 100 + 3 * n && table[0] == 2.5 && table[9] == 1.5);
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, p));
    REQUIRE(attributes.type == cudaMemoryTypeManaged);
    int *d;
    CUDA(cudaMalloc(&d, n * 4));
    CUDA(cudaMemcpy(d, p, n * 4, cudaMemcpyDefault));
    std::vector<int> back(n);
    CUDA(cudaMemcpy(back.data(), d, n * 4, cudaMemcpyDefault));
    for (int i = 0; i < n; i++) REQUIRE(back[i] == i + 3);
    CUDA(cudaFree(d));
    CUDA(cudaFree(p));
    OK("%d ints", n);
}
