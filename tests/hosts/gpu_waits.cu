// A kernel that waits for a write of the program's to managed memory. It ends where both may use
// that at once; by pages the write waits for the kernel, and neither goes on.
// Usage: gpu_waits 1
#include "steps.h"

__global__ void wait_for(volatile uint32_t *flag, uint32_t *seen)
{
    while (*flag == 0) {
    }
    *seen = *flag;
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 1);
    uint32_t *flag, *seen;
    CUDA(cudaMallocManaged(&flag, 4));
    CUDA(cudaMallocManaged(&seen, 4));
    *flag = *seen = 0;
    wait_for<<<1, 1>>>(flag, seen);
    *(volatile uint32_t *)flag = 42;
    CUDA(cudaDeviceSynchronize());
    REQUIRE(*seen == 42);
    steps.done(1);
    return steps.well();
}
