// Modules by the driver API: two PTX texts linked, a library's kernels by name and number, an error
// log.
// build: {cuda}
#include "check.h"
#include <cstring>
#include <cuda.h>
#include <string>

#define HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"

static const char caller[] = HEAD R"(
.extern .func (.param .b32 r) twice(.param .b32 x);
.visible .global .align 4 .u32 bias = 5;
.visible .entry fill(.param .u64 out, .param .u32 n)
{
    .reg .b32 %r<6>; .reg .b64 %rd<4>; .reg .pred %p;
    .param .b32 a; .param .b32 b;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %tid.x;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    st.param.b32 [a], %r2;
    call (b), twice, (a);
    ld.param.b32 %r3, [b];
    ld.global.u32 %r4, [bias];
    add.u32 %r3, %r3, %r4;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.u32 [%rd3], %r3;
    ret;
}
)";

static const char callee[] = HEAD R"(
.visible .func (.param .b32 r) twice(.param .b32 x)
{
    .reg .b32 %r<3>;
    ld.param.b32 %r1, [x];
    shl.b32 %r2, %r1, 1;
    st.param.b32 [r], %r2;
    ret;
}
)";

static const char two[] = HEAD R"(
.visible .entry one(.param .u64 out) { .reg .b64 %rd; ld.param.u64 %rd, [out]; st.global.u32 [%rd], 1; ret; }
.visible .entry two(.param .u64 out, .param .align 8 .b8 pair[24], .param .u8 tail)
{ .reg .b64 %rd; ld.param.u64 %rd, [out]; st.global.u32 [%rd], 2; ret; }
)";

static void link(CUdeviceptr out)
{
    char log[512] = "x";
    CUjit_option names[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[] = {log, (void *)sizeof log};
    CUlinkState state;
    void *image;
    size_t size;
    DRIVER(cuLinkCreate(2, names, values, &state));
    DRIVER(cuLinkAddData(state, CU_JIT_INPUT_PTX, (void *)caller, sizeof caller, "caller", 0, nullptr, nullptr));
    DRIVER(cuLinkAddData(state, CU_JIT_INPUT_PTX, (void *)callee, sizeof callee, "callee", 0, nullptr, nullptr));
    DRIVER(cuLinkComplete(state, &image, &size));
    REQUIRE(size > 0);
    CUmodule module;
    DRIVER(cuModuleLoadData(&module, image));
    DRIVER(cuLinkDestroy(state));
    CUfunction fill;
    DRIVER(cuModuleGetFunction(&fill, module, "fill"));
    unsigned n = 100;
    void *params[] = {&out, &n};
    DRIVER(cuLaunchKernel(fill, 1, 1, 1, 128, 1, 1, 0, nullptr, params, nullptr));
    std::vector<unsigned> got(n);
    DRIVER(cuMemcpyDtoH(got.data(), out, n * 4));
    for (unsigned i = 0; i < n; i++) REQUIRE(got[i] == 2 * i + 5);
    DRIVER(cuModuleUnload(module));

    values[1] = (void *)sizeof log; // held what was written
    DRIVER(cuLinkCreate(2, names, values, &state));
    char bad[] = HEAD ".visible .entry bad( { ret; }";
    REQUIRE(cuLinkAddData(state, CU_JIT_INPUT_PTX, bad, sizeof bad, "bad", 0, nullptr, nullptr) != CUDA_SUCCESS
            || cuLinkComplete(state, &image, &size) != CUDA_SUCCESS);
    REQUIRE(std::strlen(log) > 10);
    DRIVER(cuLinkDestroy(state));
}

static void library(CUdeviceptr out)
{
    CUlibrary library;
    std::string text = two; // may go once the library is loaded
    DRIVER(cuLibraryLoadData(&library, text.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0));
    std::fill(text.begin(), text.end(), '#');
    unsigned count;
    DRIVER(cuLibraryGetKernelCount(&count, library));
    REQUIRE(count == 2);
    CUkernel all[2], kernel;
    DRIVER(cuLibraryEnumerateKernels(all, 2, library));
    DRIVER(cuLibraryGetKernel(&kernel, library, "two"));
    REQUIRE(kernel == all[0] || kernel == all[1]);
    REQUIRE(cuLibraryGetKernel(&kernel, library, "three") == CUDA_ERROR_NOT_FOUND);
    const char *name;
    DRIVER(cuKernelGetName(&name, kernel));
    REQUIRE(!std::strcmp(name, "two"));
    size_t offset, size;
    DRIVER(cuKernelGetParamInfo(kernel, 1, &offset, &size));
    REQUIRE(offset == 8 && size == 24);
    DRIVER(cuKernelGetParamInfo(kernel, 2, &offset, &size));
    REQUIRE(offset == 32 && size == 1);
    REQUIRE(cuKernelGetParamInfo(kernel, 3, &offset, &size) == CUDA_ERROR_INVALID_VALUE);
    char pair[24] = {}, tail = 0;
    void *params[] = {&out, pair, &tail};
    DRIVER(cuLaunchKernel((CUfunction)kernel, 1, 1, 1, 1, 1, 1, 0, nullptr, params, nullptr));
    unsigned got;
    DRIVER(cuMemcpyDtoH(&got, out, 4));
    REQUIRE(got == 2);
    CUfunction function;
    DRIVER(cuKernelGetFunction(&function, kernel));
    int threads;
    DRIVER(cuFuncGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
    REQUIRE(threads > 0 && threads <= 1024);
    CUmodule module;
    CUfunction one;
    DRIVER(cuLibraryGetModule(&module, library));
    DRIVER(cuModuleGetFunction(&one, module, "one"));
    void *only[] = {&out};
    DRIVER(cuLaunchKernel(one, 1, 1, 1, 1, 1, 1, 0, nullptr, only, nullptr));
    DRIVER(cuMemcpyDtoH(&got, out, 4));
    REQUIRE(got == 1);
    DRIVER(cuLibraryUnload(library));
}

int main()
{
    DRIVER(cuInit(0));
    CUdevice device;
    CUcontext context;
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    CUdeviceptr out;
    DRIVER(cuMemAlloc(&out, 4096));
    link(out);
    library(out);
    OK("linked, and by name");
}
