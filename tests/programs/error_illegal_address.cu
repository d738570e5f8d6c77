// A wild store: the fault sticks to the context, every call says so, the program lives on.
// checkpoint refused: copy of the devices' memory cannot be read
// check finds: illegal address in kernel
#include "check.h"

__global__ void wild(int *p, long long offset) { p[offset] = 1; }

int main()
{
    Device<int> d(16);
    wild<<<1, 1>>>(d, 3);
    CUDA(cudaDeviceSynchronize());
    wild<<<1, 1>>>(nullptr, 0);
    EXPECT(cudaErrorIllegalAddress, cudaDeviceSynchronize());
    int x, *p;
    EXPECT(cudaErrorIllegalAddress, cudaMemcpy(&x, d, 4, cudaMemcpyDeviceToHost));
    EXPECT(cudaErrorIllegalAddress, cudaMalloc(&p, 4));
    wild<<<1, 1>>>(d, 3);
    EXPECT(cudaErrorIllegalAddress, cudaGetLastError());
    EXPECT(cudaErrorIllegalAddress, cudaDeviceSynchronize());
    OK("stuck and alive");
}
