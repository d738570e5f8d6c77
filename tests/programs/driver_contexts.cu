// Contexts by the driver API: a stack for each thread, the primary context, what ends with a
// context.
// build: {cuda} -Xcompiler -pthread
#include "check.h"
#include <cuda.h>
#include <thread>

static CUcontext current()
{
    CUcontext context = nullptr;
    DRIVER(cuCtxGetCurrent(&context));
    return context;
}

static CUcontext create(CUdevice device)
{
    CUcontext context;
#if CUDA_VERSION >= 13000
    DRIVER(cuCtxCreate(&context, nullptr, CU_CTX_SCHED_YIELD, device));
#else
    DRIVER(cuCtxCreate(&context, CU_CTX_SCHED_YIELD, device));
#endif
    return context;
}

static void stack(CUdevice device)
{
    CUcontext a = create(device), b = create(device), popped;
    REQUIRE(a != b && current() == b);
    DRIVER(cuCtxPopCurrent(&popped));
    REQUIRE(popped == b && current() == a);
    DRIVER(cuCtxPushCurrent(b));
    std::thread([&] {
        REQUIRE(current() == nullptr);
        CUdeviceptr p;
        REQUIRE(cuMemAlloc(&p, 4) == CUDA_ERROR_INVALID_CONTEXT);
        DRIVER(cuCtxSetCurrent(a));
        DRIVER(cuMemAlloc(&p, 4));
        DRIVER(cuMemFree(p));
        DRIVER(cuCtxSetCurrent(nullptr));
        REQUIRE(current() == nullptr);
    }).join();
    unsigned flags;
    DRIVER(cuCtxGetFlags(&flags));
    REQUIRE((flags & CU_CTX_SCHED_MASK) == CU_CTX_SCHED_YIELD);
    size_t limit;
    DRIVER(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    DRIVER(cuCtxGetLimit(&limit, CU_LIMIT_STACK_SIZE));
    REQUIRE(limit >= 4096);
    unsigned long long id_a, id_b;
    DRIVER(cuCtxGetId(a, &id_a));
    DRIVER(cuCtxGetId(b, &id_b));
    REQUIRE(id_a != id_b);
    DRIVER(cuCtxDestroy(b)); // was current: goes from the stack
    REQUIRE(current() == a);
    DRIVER(cuCtxDestroy(a));
    REQUIRE(current() == nullptr);
}

static void primary(CUdevice device)
{
    unsigned flags;
    int active;
    CUcontext first, second;
    DRIVER(cuDevicePrimaryCtxGetState(device, &flags, &active));
    REQUIRE(!active);
    DRIVER(cuDevicePrimaryCtxRetain(&first, device));
    DRIVER(cuDevicePrimaryCtxRetain(&second, device));
    REQUIRE(first == second && current() == nullptr);
    DRIVER(cuDevicePrimaryCtxGetState(device, &flags, &active));
    REQUIRE(active);
    DRIVER(cuCtxSetCurrent(first));
    CUdevice of;
    DRIVER(cuCtxGetDevice(&of));
    REQUIRE(of == device);
    CUdeviceptr p;
    DRIVER(cuMemAlloc(&p, 1 << 20));
    DRIVER(cuDevicePrimaryCtxRelease(device));
    DRIVER(cuMemsetD8(p, 1, 1 << 20)); // still retained once
    DRIVER(cuDevicePrimaryCtxRelease(device));
    DRIVER(cuDevicePrimaryCtxGetState(device, &flags, &active));
    REQUIRE(!active);
    REQUIRE(cuDevicePrimaryCtxRelease(device) == CUDA_ERROR_INVALID_CONTEXT);
    DRIVER(cuDevicePrimaryCtxRetain(&second, device));
    DRIVER(cuCtxSetCurrent(second));
    DRIVER(cuMemAlloc(&p, 1 << 20));
    DRIVER(cuDevicePrimaryCtxReset(device));
}

int main()
{
    CUcontext context;
    int count;
    REQUIRE(cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED);
    REQUIRE(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
    REQUIRE(cuInit(1) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuInit(0));
    CUdevice device;
    DRIVER(cuDeviceGetCount(&count));
    REQUIRE(count >= 1);
    REQUIRE(cuDeviceGet(&device, count) == CUDA_ERROR_INVALID_DEVICE);
    DRIVER(cuDeviceGet(&device, 0));
    REQUIRE(cuCtxPopCurrent(&context) == CUDA_ERROR_INVALID_CONTEXT);
    REQUIRE(cuCtxSynchronize() == CUDA_ERROR_INVALID_CONTEXT);
    char bus[32];
    CUdevice same;
    DRIVER(cuDeviceGetPCIBusId(bus, sizeof bus, device));
    DRIVER(cuDeviceGetByPCIBusId(&same, bus));
    REQUIRE(same == device);
    stack(device);
    primary(device);
    OK("a stack and a primary context");
}
