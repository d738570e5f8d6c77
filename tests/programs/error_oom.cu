// Out of memory is the call's own answer; smaller requests still succeed; freeing gives it back.
// alone: it takes all of the device's memory
#include "check.h"
#include <chrono>
#include <thread>

int main()
{
    size_t free, total, after;
    CUDA(cudaMemGetInfo(&free, &total));
    REQUIRE(free > 0 && free <= total);
    void *p = (void *)1;
    EXPECT(cudaErrorMemoryAllocation, cudaMalloc(&p, total + (1ull << 30)));
    EXPECT(cudaErrorMemoryAllocation, cudaGetLastError());
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    std::vector<void *> all;
    const size_t piece = std::max<size_t>(free / 16, 1 << 20);
    do {
        while (cudaMalloc(&p, piece) == cudaSuccess && all.size() < 64) all.push_back(p);
        REQUIRE(all.size() >= 8 && all.size() < 64);
        REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation);
        CUDA(cudaMemGetInfo(&after, &total));
        // More, where others on the device have given back some meanwhile.
    } while (after >= piece);
    CUDA(cudaFree(all.back()));
    all.pop_back();
    CUDA(cudaMalloc(&p, piece));
    CUDA(cudaMemset(p, 1, 4096));
    CUDA(cudaFree(p));
    for (void *q : all) CUDA(cudaFree(q));
    // What others take of the device meanwhile they give back.
    for (int tries = 0; tries < 200; tries++) {
        CUDA(cudaMemGetInfo(&after, &total));
        if (after + (64 << 20) >= free) break;
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    REQUIRE(after + (64 << 20) >= free);
    EXPECT(cudaErrorInvalidValue, cudaFree((void *)0x1234));
    (void)cudaGetLastError();
    // Their number depends on what else this machine does.
    OK("pieces");
}
