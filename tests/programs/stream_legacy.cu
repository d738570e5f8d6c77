// The legacy default stream waits for blocking streams and they for it; non-blocking ones do not.
#include "check.h"

__global__ void wait_then_set(volatile int *gate, int *out, int value)
{
    while (*gate == 0) {}
    *out = value;
}

__global__ void copy(int *to, const int *from) { *to = *from; }

int main()
{
    volatile int *gate;
    int *cell;
    CUDA(cudaHostAlloc((void **)&gate, 64, cudaHostAllocMapped));
    CUDA(cudaHostAlloc((void **)&cell, 64, cudaHostAllocMapped));
    *gate = 0;
    for (int i = 0; i < 8; i++) cell[i] = 0;
    PRELOAD(wait_then_set);
    PRELOAD(copy);
    cudaStream_t blocking, free;
    CUDA(cudaStreamCreate(&blocking));
    CUDA(cudaStreamCreateWithFlags(&free, cudaStreamNonBlocking));
    wait_then_set<<<1, 1, 0, blocking>>>(gate, cell, 5);
    copy<<<1, 1>>>(cell + 1, cell);              // legacy: after the blocking stream
    copy<<<1, 1, 0, free>>>(cell + 2, cell + 3); // runs at once
    CUDA(cudaStreamSynchronize(free));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(0));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(blocking));
    cudaStream_t other;
    CUDA(cudaStreamCreate(&other));
    copy<<<1, 1, 0, other>>>(cell + 4, cell + 1); // blocking: after the legacy stream
    EXPECT(cudaErrorNotReady, cudaStreamQuery(other));
    *gate = 1;
    CUDA(cudaStreamSynchronize(other));
    REQUIRE(cell[0] == 5 && cell[1] == 5 && cell[4] == 5);
    CUDA(cudaStreamQuery(0));
    OK("legacy, blocking, non-blocking");
}
