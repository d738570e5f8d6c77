// The driver API alone: a context, a module from PTX text, a launch by kernelParams and by extra.
// build: {cuda}
#include "check.h"
#include <cstring>
#include <cuda.h>

static const char ptx[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .global .align 4 .u32 calls;
.visible .entry saxpy(.param .u64 px, .param .u64 py, .param .f32 a, .param .u32 n)
{
    .reg .pred %p;
    .reg .f32 %f<4>;
    .reg .b32 %r<6>;
    .reg .b64 %rd<7>;
    ld.param.u64 %rd1, [px];
    ld.param.u64 %rd2, [py];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ge.u32 %p, %r5, %r1;
    @%p bra DONE;
    mul.wide.u32 %rd3, %r5, 4;
    cvta.to.global.u64 %rd1, %rd1;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    ld.f32 %f3, [%rd5];
    fma.rn.f32 %f3, %f1, %f2, %f3;
    st.global.f32 [%rd5], %f3;
    mov.u64 %rd6, calls;
    red.global.add.u32 [%rd6], 1;
DONE:
    ret;
}
)";

int main()
{
    DRIVER(cuInit(0));
    CUdevice device;
    CUcontext context, current;
    DRIVER(cuDeviceGet(&device, 0));
    char name[100];
    DRIVER(cuDeviceGetName(name, sizeof name, device));
    REQUIRE(strlen(name) > 0);
#if CUDA_VERSION >= 13000
    DRIVER(cuCtxCreate(&context, nullptr, 0, device));
#else
    DRIVER(cuCtxCreate(&context, 0, device));
#endif
    DRIVER(cuCtxGetCurrent(&current));
    REQUIRE(current == context);
    CUmodule module;
    CUfunction kernel;
    DRIVER(cuModuleLoadData(&module, ptx));
    DRIVER(cuModuleGetFunction(&kernel, module, "saxpy"));
    REQUIRE(cuModuleGetFunction(&kernel, module, "missing") == CUDA_ERROR_NOT_FOUND);
    DRIVER(cuModuleGetFunction(&kernel, module, "saxpy"));
    unsigned n = 1000;
    float a = 2.5f;
    std::vector<float> x(n), y(n), got(n);
    for (unsigned i = 0; i < n; i++) x[i] = i, y[i] = 1;
    CUdeviceptr dx, dy, calls;
    size_t size;
    DRIVER(cuMemAlloc(&dx, n * 4));
    DRIVER(cuMemAlloc(&dy, n * 4));
    DRIVER(cuMemcpyHtoD(dx, x.data(), n * 4));
    DRIVER(cuMemcpyHtoD(dy, y.data(), n * 4));
    void *params[] = {&dx, &dy, &a, &n};
    DRIVER(cuLaunchKernel(kernel, (n + 127) / 128, 1, 1, 128, 1, 1, 0, 0, params, nullptr));
    struct {
        CUdeviceptr x, y;
        float a;
        unsigned n;
    } packed = {dx, dy, a, n};
    size_t bytes = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END};
    DRIVER(cuLaunchKernel(kernel, (n + 127) / 128, 1, 1, 128, 1, 1, 0, 0, nullptr, extra));
    DRIVER(cuCtxSynchronize());
    DRIVER(cuMemcpyDtoH(got.data(), dy, n * 4));
    for (unsigned i = 0; i < n; i++) REQUIRE(got[i] == 1 + 5.0f * i);
    DRIVER(cuModuleGetGlobal(&calls, &size, module, "calls"));
    unsigned count;
    REQUIRE(size == 4);
    DRIVER(cuMemcpyDtoH(&count, calls, 4));
    REQUIRE(count == 2 * n);
    const char *text;
    DRIVER(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    REQUIRE(!strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
    DRIVER(cuMemsetD16(dx, 0x1234, 2 * n));
    DRIVER(cuMemsetD32(dx + 4, 7, 1));
    unsigned words[3];
    DRIVER(cuMemcpyDtoH(words, dx, 12));
    REQUIRE(words[0] == 0x12341234 && words[1] == 7 && words[2] == 0x12341234);
    CUdeviceptr base;
    DRIVER(cuMemGetAddressRange(&base, &size, dy + 100));
    REQUIRE(base == dy && size == n * 4);
    DRIVER(cuMemFree(dx));
    DRIVER(cuMemFree(dy));
    REQUIRE(cuMemFree(dy) != 0);
    DRIVER(cuModuleUnload(module));
    DRIVER(cuCtxDestroy(context));
    OK("%u elements twice", n);
}
