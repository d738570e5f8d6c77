// A framework in small: `make FILE` compiles a kernel to machine code with NVRTC, runs it and keeps
// the cubin in a file; `load FILE` runs what is there. Prints what the driver has to say of a cubin
// that it does not take.
#include "../programs/check.h"
#include <cuda.h>
#include <nvrtc.h>
#include <cstring>
#include <string>

static const char source[] =
    "extern \"C\" __global__ void triple(int *p) { p[threadIdx.x] = 3 * threadIdx.x; }";

static std::vector<char> compile()
{
    nvrtcProgram program;
    REQUIRE(nvrtcCreateProgram(&program, source, "k.cu", 0, nullptr, nullptr) == NVRTC_SUCCESS);
    const char *options[] = {"--gpu-architecture=sm_90"};
    REQUIRE(nvrtcCompileProgram(program, 1, options) == NVRTC_SUCCESS);
    size_t size;
    REQUIRE(nvrtcGetCUBINSize(program, &size) == NVRTC_SUCCESS && size > 0);
    std::vector<char> cubin(size);
    REQUIRE(nvrtcGetCUBIN(program, cubin.data()) == NVRTC_SUCCESS);
    REQUIRE(nvrtcDestroyProgram(&program) == NVRTC_SUCCESS);
    return cubin;
}

static void run(CUmodule module)
{
    CUfunction kernel;
    CUdeviceptr out;
    int got[32];
    DRIVER(cuModuleGetFunction(&kernel, module, "triple"));
    DRIVER(cuMemAlloc(&out, sizeof got));
    void *args[] = {&out};
    DRIVER(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, nullptr, args, nullptr));
    DRIVER(cuMemcpyDtoH(got, out, sizeof got));
    for (int i = 0; i < 32; i++) REQUIRE(got[i] == 3 * i);
    DRIVER(cuModuleUnload(module));
}

int main(int count, char **words)
{
    REQUIRE(count == 3);
    CUdevice device;
    CUcontext context;
    CUmodule module;
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    std::vector<char> cubin(1 << 20);
    if (!std::strcmp(words[1], "make")) {
        cubin = compile();
        std::FILE *file = std::fopen(words[2], "wb");
        REQUIRE(file && std::fwrite(cubin.data(), 1, cubin.size(), file) == cubin.size());
        REQUIRE(std::fclose(file) == 0);
    } else {
        std::FILE *file = std::fopen(words[2], "rb");
        REQUIRE(file);
        cubin.resize(std::fread(cubin.data(), 1, cubin.size(), file));
        std::fclose(file);
    }
    char log[4096] = "";
    CUjit_option options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    CUresult status = cuModuleLoadDataEx(&module, cubin.data(), 2, options, values);
    if (status != CUDA_SUCCESS) {
        std::printf("refused %d: %s\n", (int)status, log);
        return 3;
    }
    run(module);
    DRIVER(cuModuleLoad(&module, words[2]));
    run(module);
    OK("a cubin");
}
