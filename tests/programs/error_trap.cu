// trap ends the kernel as a launch failure, and sticks.
// checkpoint refused: copy of the devices' memory cannot be read
// check finds: trap in kernel
#include "check.h"

__global__ void trap(int *p)
{
    if (threadIdx.x == 5) asm volatile("trap;");
    p[threadIdx.x] = 1;
}

int main()
{
    Device<int> d(64);
    trap<<<1, 64>>>(d);
    EXPECT(cudaErrorLaunchFailure, cudaDeviceSynchronize());
    EXPECT(cudaErrorLaunchFailure, cudaDeviceSynchronize());
    OK("trapped");
}
