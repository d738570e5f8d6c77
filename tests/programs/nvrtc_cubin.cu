// Kernels compiled to machine code at run time by NVRTC, as samples and CuPy do: two of one name.
// build: {cuda} -lnvrtc -L{toolkit}/lib -Xlinker -rpath -Xlinker {toolkit}/lib
#include "check.h"
#include <cuda.h>
#include <nvrtc.h>
#include <string>

static const char source[] = R"(
extern "C" __global__ void run(int *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i * FACTOR;
}
)";

static std::vector<char> compile(int major, int minor, int factor)
{
    nvrtcProgram program;
    REQUIRE(nvrtcCreateProgram(&program, source, "run.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS);
    std::string arch = "--gpu-architecture=sm_" + std::to_string(major) + std::to_string(minor);
    std::string define = "-DFACTOR=" + std::to_string(factor);
    const char *options[] = {arch.c_str(), define.c_str()};
    REQUIRE(nvrtcCompileProgram(program, 2, options) == NVRTC_SUCCESS);
    size_t size;
    REQUIRE(nvrtcGetCUBINSize(program, &size) == NVRTC_SUCCESS && size > 0);
    std::vector<char> cubin(size);
    REQUIRE(nvrtcGetCUBIN(program, cubin.data()) == NVRTC_SUCCESS);
    REQUIRE(nvrtcDestroyProgram(&program) == NVRTC_SUCCESS);
    return cubin;
}

int main()
{
    const int n = 3000;
    Device<int> out(n);
    int major, minor;
    CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    std::vector<char> cubins[] = {compile(major, minor, 3), compile(major, minor, 7)};
    for (int which = 0; which < 2; which++) {
        CUmodule module;
        CUfunction kernel;
        DRIVER(cuModuleLoadData(&module, cubins[which].data()));
        DRIVER(cuModuleGetFunction(&kernel, module, "run"));
        int count = n;
        void *args[] = {&out.data, &count};
        DRIVER(cuLaunchKernel(kernel, (n + 255) / 256, 1, 1, 256, 1, 1, 0, 0, args, nullptr));
        auto got = out.host();
        for (int i = 0; i < n; i++) REQUIRE(got[i] == i * (which ? 7 : 3));
        DRIVER(cuModuleUnload(module));
    }
    OK("two cubins");
}
