// A thread that synchronises does not block the posts of another that it waits for.
// build: -Xcompiler -pthread
#include "check.h"
#include <thread>
#include <unistd.h>

__global__ void wait_for(volatile int *flag) { while (*flag == 0) {} }
__global__ void raise(volatile int *flag) { *flag = 1; }

int main()
{
    volatile int *flag;
    CUDA(cudaHostAlloc((void **)&flag, 64, cudaHostAllocMapped));
    *flag = 0;
    PRELOAD(wait_for);
    PRELOAD(raise);
    cudaStream_t a, b;
    CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    wait_for<<<1, 1, 0, a>>>(flag);
    std::thread poster([&] {
        usleep(100000);
        raise<<<1, 1, 0, b>>>(flag);
    });
    CUDA(cudaStreamSynchronize(a));
    poster.join();
    CUDA(cudaDeviceSynchronize());
    OK("woken by the other thread");
}
