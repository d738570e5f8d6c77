// A launch that cannot run is reported by the launch, at once, and does not stick.
#include "check.h"

// Runtimes before 13 name the configuration, later ones the value.
static bool refused(cudaError_t status)
{
    return status == cudaErrorInvalidConfiguration || status == cudaErrorInvalidValue;
}

__global__ void kernel(int *p) { p[threadIdx.x] = 1; }

int main()
{
    Device<int> d(1024);
    kernel<<<1, 1025>>>(d);
    REQUIRE(refused(cudaGetLastError()));
    kernel<<<1, dim3(1, 1, 65)>>>(d);
    REQUIRE(refused(cudaGetLastError()));
    kernel<<<0, 32>>>(d);
    REQUIRE(refused(cudaGetLastError()));
    kernel<<<dim3(1, 65536), 32>>>(d);
    REQUIRE(refused(cudaGetLastError()));
    kernel<<<1, 32, 1 << 20>>>(d);
    EXPECT(cudaErrorInvalidValue, cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaMemset(d, 0, 4096));
    kernel<<<1, 1024>>>(d);
    CUDA(cudaGetLastError());
    for (int x : d.host()) REQUIRE(x == 1);
    OK("five refusals");
}
