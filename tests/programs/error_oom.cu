// Out of memory is the call's own answer; smaller requests still succeed; freeing gives it back.
#include "check.h"

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
    while (cudaMalloc(&p, piece) == cudaSuccess && all.size() < 64) all.push_back(p);
    REQUIRE(all.size() >= 8 && all.size() < 64);
    REQUIRE(cudaGetLastError() == cudaErrorMemoryAllocation);
    CUDA(cudaMemGetInfo(&after, &total));
    REQUIRE(after < piece);
    CUDA(cudaFree(all.back()));
    all.pop_back();
    CUDA(cudaMalloc(&p, piece));
    CUDA(cudaMemset(p, 1, 4096));
    CUDA(cudaFree(p));
    for (void *q : all) CUDA(cudaFree(q));
    CUDA(cudaMemGetInfo(&after, &total));
    REQUIRE(after + (64 << 20) >= free);
    EXPECT(cudaErrorInvalidValue, cudaFree((void *)0x1234));
    (void)cudaGetLastError();
    // Their number depends on what else this machine does.
    OK("pieces");
}
