// A grid's barrier by the device runtime's own functions, which Numba's grid groups call.
// build: -rdc=true -lcudadevrt
#include "check.h"

__global__ void turns(unsigned long long *sums, int *wrong, int steps)
{
    unsigned long long grid = cudaCGGetIntrinsicHandle(cudaCGScopeGrid);
    unsigned blocks = gridDim.x * gridDim.y;
    for (int step = 0; step < steps; step++) {
        if (threadIdx.x == 0 && threadIdx.y == 0) atomicAdd(&sums[step], 1ull);
        if (cudaCGSynchronize(grid, 0) != cudaSuccess) atomicAdd(wrong, 1);
        if (*(volatile unsigned long long *)&sums[step] != blocks) atomicAdd(wrong, 1);
    }
}

int main()
{
    const int steps = 20;
    Device<unsigned long long> sums(steps);
    Device<int> wrong(1);
    CUDA(cudaMemset(sums.data, 0, steps * sizeof(unsigned long long)));
    CUDA(cudaMemset(wrong.data, 0, sizeof(int)));
    int count = steps;
    void *args[] = {&sums.data, &wrong.data, &count};
    CUDA(cudaLaunchCooperativeKernel((void *)turns, dim3(4, 2), dim3(48, 2), args, 0, nullptr));
    CUDA(cudaDeviceSynchronize());
    for (unsigned long long sum : sums.host()) REQUIRE(sum == 8);
    REQUIRE(wrong.host()[0] == 0);
    OK("20 barriers of 8 blocks");
}
