// --default-stream per-thread: each host thread has a stream of its own.
// build: --default-stream per-thread -Xcompiler -pthread
#include "check.h"
#include <thread>

__global__ void wait_for(volatile int *gate) { while (*gate == 0) {} }
__global__ void store(int *p, int v) { *p = v; }

int main()
{
    volatile int *gate;
    CUDA(cudaHostAlloc((void **)&gate, 64, cudaHostAllocMapped));
    *gate = 0;
    PRELOAD(wait_for);
    PRELOAD(store);
    Device<int> d(8);
    wait_for<<<1, 1>>>(gate); // this thread's stream is busy
    std::thread([&] {
        for (int i = 0; i < 8; i++) store<<<1, 1>>>(d + i, i * i);
        std::vector<int> got(8);
        CUDA(cudaMemcpyAsync(got.data(), d, 32, cudaMemcpyDeviceToHost, cudaStreamPerThread));
        CUDA(cudaStreamSynchronize(cudaStreamPerThread)); // does not wait for the other thread's
        for (int i = 0; i < 8; i++) REQUIRE(got[i] == i * i);
    }).join();
    EXPECT(cudaErrorNotReady, cudaStreamQuery(cudaStreamPerThread));
    *gate = 1;
    CUDA(cudaStreamSynchronize(cudaStreamPerThread));
    OK("two threads");
}
