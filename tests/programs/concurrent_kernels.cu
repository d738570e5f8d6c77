// Two kernels in two streams that wait for each other must both be running.
#include "check.h"

__global__ void ping(volatile int *mine, volatile int *theirs, int rounds)
{
    for (int r = 1; r <= rounds; r++) {
        *mine = r;
        __threadfence();
        while (*theirs < r) {}
    }
}

int main()
{
    Device<int> a(1), b(1);
    CUDA(cudaMemset(a, 0, 4));
    CUDA(cudaMemset(b, 0, 4));
    cudaStream_t s, t;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&t, cudaStreamNonBlocking));
    CUDA(cudaDeviceSynchronize());
    ping<<<1, 1, 0, s>>>(a, b, 100);
    ping<<<1, 1, 0, t>>>(b, a, 100);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(a.host()[0] == 100 && b.host()[0] == 100);
    OK("100 rounds");
}
