// Memory of the program's own, registered: copied, read and written by kernels, given back whole.
#include "check.h"

__global__ void triple(int *p, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] *= 3;
}

int main()
{
    const int n = 30001;
    std::vector<int> guard(5000, 77);
    int *mine = (int *)aligned_alloc(4096, 32 * 4096);
    for (int i = 0; i < n; i++) mine[i] = i;
    CUDA(cudaHostRegister(mine, n * sizeof(int), cudaHostRegisterMapped));
    EXPECT(cudaErrorHostMemoryAlreadyRegistered, cudaHostRegister(mine, n * sizeof(int), cudaHostRegisterMapped));
    (void)cudaGetLastError();
    int *alias;
    CUDA(cudaHostGetDevicePointer((void **)&alias, mine, 0));
    triple<<<1, 256>>>(alias, n);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(mine[i] == 3 * i);
    mine[7] = -7;
    Device<int> d(n);
    CUDA(cudaMemcpyAsync(d, mine, n * sizeof(int), cudaMemcpyHostToDevice));
    triple<<<1, 256>>>(d, n);
    CUDA(cudaMemcpyAsync(mine, d, n * sizeof(int), cudaMemcpyDeviceToHost));
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(mine[i] == (i == 7 ? -21 : 9 * i));
    CUDA(cudaHostUnregister(mine));
    EXPECT(cudaErrorHostMemoryNotRegistered, cudaHostUnregister(mine));
    (void)cudaGetLastError();
    for (int i = 0; i < n; i++) REQUIRE(mine[i] == (i == 7 ? -21 : 9 * i));
    free(mine);
    for (int g : guard) REQUIRE(g == 77);
    OK("%d ints", n);
}
