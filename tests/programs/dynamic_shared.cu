// Dynamic shared memory past 48 KiB: refused until asked for, several types in one buffer.
#include "check.h"

__global__ void rotate(const int *in, int *out, int n, int by)
{
    extern __shared__ __align__(16) unsigned char raw[];
    int *ints = reinterpret_cast<int *>(raw);
    double *sum = reinterpret_cast<double *>(raw + n * sizeof(int));
    for (int i = threadIdx.x; i < n; i += blockDim.x) ints[i] = in[i];
    if (threadIdx.x == 0) *sum = 0.5;
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = ints[(i + by) % n] + int(*sum * 2);
}

int main()
{
    const int n = 15000;
    const size_t bytes = n * sizeof(int) + sizeof(double);
    std::vector<int> in(n);
    for (int i = 0; i < n; i++) in[i] = i * 3;
    Device<int> din(in), out(n);
    rotate<<<1, 256, bytes>>>(din, out, n, 5);
    EXPECT(cudaErrorInvalidValue, cudaGetLastError());
    CUDA(cudaFuncSetAttribute(rotate, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
    rotate<<<1, 256, bytes>>>(din, out, n, 5);
    CUDA(cudaGetLastError());
    auto got = out.host();
    for (int i = 0; i < n; i++) REQUIRE(got[i] == (i + 5) % n * 3 + 1);
    int most;
    CUDA(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    EXPECT(cudaErrorInvalidValue, cudaFuncSetAttribute(rotate, cudaFuncAttributeMaxDynamicSharedMemorySize, most + 1));
    (void)cudaGetLastError();
    OK("%zu bytes", bytes);
}
