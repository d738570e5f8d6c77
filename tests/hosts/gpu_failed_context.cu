// A context fails on whose stream managed memory moves. What lies on the device is no context's:
// another one's host reads it, and has it give way to more than there is room for.
// Usage: gpu_failed_context [MIB of the device]
#include "../programs/check.h"
#include <cuda.h>

__global__ void fill(unsigned *words, size_t n, unsigned seed)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        words[i] = unsigned(i) * 2654435761u + seed;
}

__global__ void wild(int *p) { *p = 1; }

static CUcontext create(CUdevice device)
{
    CUcontext context;
#if CUDA_VERSION >= 13000
    DRIVER(cuCtxCreate(&context, nullptr, 0, device));
#else
    DRIVER(cuCtxCreate(&context, 0, device));
#endif
    return context;
}

static void check(const unsigned *words, size_t from, size_t to, unsigned seed)
{
    for (size_t i = from; i < to; i++) REQUIRE(words[i] == unsigned(i) * 2654435761u + seed);
}

int main(int argc, char **argv)
{
    const size_t mib = argc > 1 ? atoi(argv[1]) : 64, n = mib << 17, page = 1024;
    CUdevice device;
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    // The first context's stream moves the first bytes, and so all others.
    CUcontext first = create(device);
    unsigned *words, *seen;
    CUDA(cudaMallocManaged(&seen, 2 << 20));
    fill<<<4, 64>>>(seen, page, 1);
    CUDA(cudaDeviceSynchronize());
    check(seen, 0, page, 1);
    CUcontext second = create(device);
    CUDA(cudaMallocManaged(&words, n * sizeof *words));
    fill<<<8, 128>>>(words, n, 7);
    CUDA(cudaDeviceSynchronize());
    DRIVER(cuCtxSetCurrent(first));
    wild<<<1, 1>>>(nullptr);
    REQUIRE(cuCtxSynchronize() == CUDA_ERROR_ILLEGAL_ADDRESS);
    DRIVER(cuCtxSetCurrent(second));
    check(words, n / 2, n / 2 + page, 7);
    void *large;
    CUDA(cudaMalloc(&large, mib * 3 << 18));
    CUDA(cudaMemset(large, 1, mib * 3 << 18));
    check(words, 0, n, 7);
    fill<<<8, 128>>>(words, n, 9);
    CUDA(cudaDeviceSynchronize());
    check(words, 0, n, 9);
    OK("nothing is lost");
}
