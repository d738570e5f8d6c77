// A kernel compiled at run time by NVRTC and loaded through the driver API.
// build: {cuda} -lnvrtc -L{toolkit}/lib -Xlinker -rpath -Xlinker {toolkit}/lib
#include "check.h"
#include <cuda.h>
#include <nvrtc.h>

static const char source[] = R"(
template <typename T> __device__ T clamp(T x, T lo, T hi) { return x < lo ? lo : x > hi ? hi : x; }
extern "C" __global__ void run(const double *in, double *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = clamp(sqrt(in[i]) * SCALE, 1.0, 50.0);
}
)";

int main()
{
    nvrtcProgram program;
    REQUIRE(nvrtcCreateProgram(&program, source, "run.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS);
    const char *options[] = {"--gpu-architecture=compute_80", "-DSCALE=3.0"};
    REQUIRE(nvrtcCompileProgram(program, 2, options) == NVRTC_SUCCESS);
    size_t size;
    REQUIRE(nvrtcGetPTXSize(program, &size) == NVRTC_SUCCESS);
    std::vector<char> ptx(size);
    REQUIRE(nvrtcGetPTX(program, ptx.data()) == NVRTC_SUCCESS);
    const int n = 5000;
    std::vector<double> in(n);
    for (int i = 0; i < n; i++) in[i] = i;
    Device<double> din(in), out(n);
    CUmodule module;
    CUfunction kernel;
    DRIVER(cuModuleLoadDataEx(&module, ptx.data(), 0, nullptr, nullptr));
    DRIVER(cuModuleGetFunction(&kernel, module, "run"));
    int count = n;
    void *args[] = {&din.data, &out.data, &count};
    DRIVER(cuLaunchKernel(kernel, (n + 255) / 256, 1, 1, 256, 1, 1, 0, 0, args, nullptr));
    auto got = out.host();
    for (int i = 0; i < n; i++) REQUIRE(got[i] == std::min(std::max(std::sqrt(double(i)) * 3.0, 1.0), 50.0));
    DRIVER(cuModuleUnload(module));
    OK("%d elements", n);
}
