// The driver API by where it is called from: a host function is told that it is one, by what works
// on no stream or event that there is; and while exit() runs the program's last functions, the main
// thread still has its context.
// build: {cuda}
#include "check.h"
#include <cuda.h>
#include <unistd.h>

static CUcontext context;
static CUdeviceptr memory;
static CUstream stream, other;
static CUmodule module;
static CUfunction function;
static void *pinned;
static int refused, allowed;

static const char text[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                           ".visible .entry k() { ret; }";

static void CUDA_CB asks(void *)
{
    union {
        CUdevice device;
        CUcontext context;
        CUdeviceptr pointer;
        CUfunction function;
        CUstream stream;
        CUevent event;
        size_t size;
        void *host;
        int number;
        unsigned flags;
    } out, more;
    const CUresult no[] = {
        cuCtxGetDevice(&out.device),
        cuCtxGetCurrent(&out.context),
        cuCtxSetCurrent(context),
        cuCtxPushCurrent(context),
        cuCtxPopCurrent(&out.context),
        cuCtxSynchronize(),
        cuDeviceGet(&out.device, 0),
        cuDeviceGetAttribute(&out.number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0),
        cuDevicePrimaryCtxGetState(0, &out.flags, &more.number),
        cuMemGetAddressRange(&out.pointer, &more.size, memory),
        cuPointerGetAttribute(&out, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, memory),
        cuMemAlloc(&out.pointer, 64),
        cuMemFree(memory),
        cuMemAllocHost(&out.host, 64),
        cuMemHostGetFlags(&out.flags, pinned),
        cuMemcpyHtoDAsync(memory, pinned, 4, other),
        cuMemcpyHtoD(memory, pinned, 4),
        cuEventCreate(&out.event, 0),
        cuStreamCreate(&out.stream, 0),
        cuModuleGetFunction(&out.function, module, "k"),
        cuFuncGetAttribute(&out.number, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function),
        cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, other, nullptr, nullptr),
    };
    for (CUresult one : no) refused += one != CUDA_ERROR_NOT_PERMITTED;
    const char *name;
    CUstreamCaptureStatus status;
    const CUresult yes[] = {
        cuInit(0),
        cuDriverGetVersion(&out.number),
        cuStreamGetCtx(other, &out.context),
        cuStreamIsCapturing(other, &status),
        cuGetErrorName(CUDA_SUCCESS, &name),
    };
    for (CUresult one : yes) allowed += one != CUDA_SUCCESS;
}

static void CUDA_CB old_style(CUstream, CUresult, void *data) { asks(data); }

static void last()
{
    CUcontext current;
    CUdeviceptr more;
    int value = 5, back = 0;
    DRIVER(cuCtxGetCurrent(&current));
    bool good = current == context;
    DRIVER(cuMemAlloc(&more, 64));
    DRIVER(cuMemcpyHtoD(more, &value, sizeof value));
    DRIVER(cuMemcpyDtoH(&back, more, sizeof back));
    DRIVER(cuStreamSynchronize(stream));
    DRIVER(cuMemFree(more));
    DRIVER(cuCtxDestroy(context));
    if (!good || back != value) {
        std::printf("at the end, %p is current, not %p\n", (void *)current, (void *)context);
        std::fflush(stdout);
        _exit(1);
    }
    std::printf("ok from a host function and at the end\n");
}

int main()
{
    CUdevice device;
    DRIVER(cuInit(0));
    std::atexit(last);
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuCtxCreate(&context, nullptr, 0, device));
    DRIVER(cuMemAlloc(&memory, 64));
    DRIVER(cuMemAllocHost(&pinned, 64));
    DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    DRIVER(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    DRIVER(cuModuleLoadData(&module, text));
    DRIVER(cuModuleGetFunction(&function, module, "k"));
    DRIVER(cuLaunchHostFunc(stream, asks, nullptr));
    DRIVER(cuStreamSynchronize(stream));
    DRIVER(cuStreamAddCallback(stream, old_style, nullptr, 0));
    DRIVER(cuStreamSynchronize(stream));
    DRIVER(cuStreamSynchronize(other));
    REQUIRE(refused == 0 && allowed == 0);
    return 0;
}
