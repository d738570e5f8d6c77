// A program that was compiled for newer GPUs alone. Software devices take its PTX; a GPU that is
// older refuses it.
// build: -gencode arch=compute_120,code=compute_120
#include "check.h"
#include <cstring>

__global__ void scale(const float *x, float *y, float factor, int *architecture)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i] = factor * x[i];
#ifdef __CUDA_ARCH__
    if (i == 0) *architecture = __CUDA_ARCH__;
#endif
}

int main()
{
    const int n = 1024;
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    std::vector<float> x(n);
    for (int i = 0; i < n; i++) x[i] = (float)i;
    Device<float> in(x), out(n);
    Device<int> architecture(1);
    scale<<<n / 256, 256>>>(in, out, 0.5f, architecture);
    cudaError_t status = cudaGetLastError();
    bool refused = status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion;
    if (refused && device.major < 12 && std::strncmp(device.name, "kedge software", 14) != 0) OK("done");
    CUDA(status);
    auto y = out.host();
    for (int i = 0; i < n; i++) REQUIRE(y[i] == 0.5f * i);
    REQUIRE(architecture.host()[0] == 1200);
    // What the library's host code chooses by.
    cudaFuncAttributes attributes;
    CUDA(cudaFuncGetAttributes(&attributes, scale));
    REQUIRE(attributes.ptxVersion == 120);
    OK("done");
}
