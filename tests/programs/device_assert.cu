// A failed device assert names its place, sticks, and leaves the host program alive.
// stderr: Assertion `x != 13` failed.
// check finds: assertion failed in kernel
#include "check.h"
#include <cassert>

__global__ void check(const int *p)
{
    int x = p[threadIdx.x];
    assert(x != 13);
}

int main()
{
    std::vector<int> v(64, 1);
    Device<int> d(v);
    check<<<1, 64>>>(d);
    CUDA(cudaDeviceSynchronize());
    v[40] = 13;
    CUDA(cudaMemcpy(d, v.data(), 256, cudaMemcpyHostToDevice));
    check<<<1, 64>>>(d);
    EXPECT(cudaErrorAssert, cudaDeviceSynchronize());
    int *p;
    EXPECT(cudaErrorAssert, cudaMalloc(&p, 4));
    OK("asserted and alive");
}
