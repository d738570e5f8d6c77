// Streams order their own work, events order between them and tell the time.
#include "check.h"

__global__ void append(int *log, int *count, int what, int spin)
{
    long long until = clock64() + spin;
    while (clock64() < until) {}
    log[atomicAdd(count, 1)] = what;
}

int main()
{
    Device<int> log(100), count(1);
    CUDA(cudaMemset(count, 0, 4));
    cudaStream_t a, b;
    CUDA(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
    cudaEvent_t first, second, start, stop;
    CUDA(cudaEventCreateWithFlags(&first, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&second, cudaEventDisableTiming));
    CUDA(cudaEventCreate(&start));
    CUDA(cudaEventCreate(&stop));
    CUDA(cudaEventRecord(start, a));
    append<<<1, 1, 0, a>>>(log, count, 1, 2000000);
    CUDA(cudaEventRecord(first, a));
    CUDA(cudaStreamWaitEvent(b, first, 0));
    append<<<1, 1, 0, b>>>(log, count, 2, 100000);
    append<<<1, 1, 0, b>>>(log, count, 3, 0);
    CUDA(cudaEventRecord(second, b));
    CUDA(cudaStreamWaitEvent(a, second, 0));
    append<<<1, 1, 0, a>>>(log, count, 4, 0);
    CUDA(cudaEventRecord(stop, a));
    CUDA(cudaEventSynchronize(stop));
    CUDA(cudaEventQuery(first));
    float ms;
    CUDA(cudaEventElapsedTime(&ms, start, stop));
    REQUIRE(ms > 0 && ms < 60000);
    auto got = log.host();
    for (int i = 0; i < 4; i++) REQUIRE(got[i] == i + 1);
    REQUIRE(count.host()[0] == 4);
    EXPECT(cudaErrorInvalidResourceHandle, cudaEventElapsedTime(&ms, first, stop));
    (void)cudaGetLastError();
    cudaEvent_t never;
    CUDA(cudaEventCreate(&never));
    CUDA(cudaEventQuery(never));
    CUDA(cudaEventSynchronize(never));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    OK("four in order");
}
