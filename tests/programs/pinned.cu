// Page-locked host memory: asynchronous copies both ways, flags, attributes.
#include "check.h"

__global__ void square(int *p, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] *= p[i];
}

int main()
{
    const int n = 400000, parts = 4, each = n / parts;
    int *host, *device;
    CUDA(cudaMallocHost(&host, n * sizeof(int)));
    CUDA(cudaMalloc(&device, n * sizeof(int)));
    for (int i = 0; i < n; i++) host[i] = i % 1000;
    cudaStream_t stream[parts];
    for (int p = 0; p < parts; p++) {
        CUDA(cudaStreamCreateWithFlags(&stream[p], cudaStreamNonBlocking));
        CUDA(cudaMemcpyAsync(device + p * each, host + p * each, each * 4, cudaMemcpyHostToDevice, stream[p]));
        square<<<(each + 255) / 256, 256, 0, stream[p]>>>(device + p * each, each);
        CUDA(cudaMemcpyAsync(host + p * each, device + p * each, each * 4, cudaMemcpyDeviceToHost, stream[p]));
    }
    for (auto s : stream) CUDA(cudaStreamSynchronize(s));
    for (int i = 0; i < n; i++) REQUIRE(host[i] == (i % 1000) * (i % 1000));
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, host + 5));
    REQUIRE(attributes.type == cudaMemoryTypeHost);
    unsigned flags;
    int *mapped;
    CUDA(cudaHostAlloc(&mapped, 4096, cudaHostAllocPortable | cudaHostAllocMapped));
    CUDA(cudaHostGetFlags(&flags, mapped));
    REQUIRE(flags & cudaHostAllocMapped);
    int plain;
    CUDA(cudaPointerGetAttributes(&attributes, &plain));
    REQUIRE(attributes.type == cudaMemoryTypeUnregistered);
    CUDA(cudaFreeHost(mapped));
    CUDA(cudaFreeHost(host));
    CUDA(cudaFree(device));
    OK("%d ints in %d streams", n, parts);
}
