// Lanes of one warp take a lock in turn: every lane makes progress on its own.
#include "check.h"

__global__ void locked(int *lock, int *cells, int n)
{
    for (int i = 0; i < n; i++) {
        while (atomicCAS(lock, 0, 1) != 0) {}
        __threadfence();
        cells[0] = cells[0] + 1;
        cells[1] = cells[1] + threadIdx.x;
        __threadfence();
        atomicExch(lock, 0);
    }
}

int main()
{
    const int blocks = 4, threads = 64, n = 5;
    Device<int> lock(1), cells(2);
    CUDA(cudaMemset(lock, 0, 4));
    CUDA(cudaMemset(cells, 0, 8));
    locked<<<blocks, threads>>>(lock, cells, n);
    CUDA(cudaDeviceSynchronize());
    auto got = cells.host();
    REQUIRE(got[0] == blocks * threads * n && got[1] == blocks * n * threads * (threads - 1) / 2);
    OK("%d turns", got[0]);
}
