// A fault spoils its context and nothing else: after cudaDeviceReset everything works again. Where
// a driver gives the device to a new process alone (580 on an H200), that is what it says.
// build: {cuda}
// check finds: trap in kernel
#include "check.h"
#include <cassert>
#include <cstring>
#include <cuda.h>

__device__ int counter = 5;
__constant__ int addend = 2;
__managed__ int shared_word = 11;

__global__ void work(int *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = i * addend + counter + shared_word;
}
__global__ void bump() { atomicAdd(&counter, 1); }
__global__ void outside(int *p) { *p = 1; }
__global__ void misaligned(char *p) { *(int *)(p + 1) = 1; }
__global__ void stop() { asm volatile("trap;"); }
__global__ void refuted(int n) { assert(n == 0); }
__global__ void forever(volatile int *flag, int *p)
{
    if (threadIdx.x == 0 && blockIdx.x == 1) *p = 1;
    while (*flag == 0) {}
}

static cudaError_t fault(int kind, int *flag)
{
    char *bytes;
    CUDA(cudaMalloc(&bytes, 64));
    switch (kind) {
    case 0: outside<<<1, 1>>>((int *)8); break;
    case 1: misaligned<<<1, 1>>>(bytes); break;
    case 2: stop<<<1, 1>>>(); break;
    case 3: refuted<<<1, 1>>>(1); break;
    default: forever<<<2, 32>>>(flag, (int *)8); break;
    }
    CUDA(cudaGetLastError());
    return cudaDeviceSynchronize();
}

// What a context holds when it is lost: memory of every kind, streams, events, a graph, work that
// waits.
static void leave_behind()
{
    int *p;
    cudaStream_t stream;
    cudaEvent_t event;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaEventCreate(&event));
    CUDA(cudaMallocAsync(&p, 1 << 20, stream));
    CUDA(cudaMemsetAsync(p, 1, 1 << 20, stream));
    CUDA(cudaEventRecord(event, stream));
    CUDA(cudaMallocHost(&p, 4096));
    CUDA(cudaMallocManaged(&p, 4096));
    p[3] = 3;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    bump<<<1, 1, 0, stream>>>();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
}

static void works()
{
    const int n = 1000;
    cudaStream_t stream;
    cudaEvent_t event;
    int *p, *managed, host[n];
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaEventCreate(&event));
    CUDA(cudaMallocAsync(&p, n * sizeof(int), stream));
    CUDA(cudaMallocManaged(&managed, 4));
    work<<<8, 128, 0, stream>>>(p, n);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpyAsync(host, p, sizeof host, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaEventRecord(event, stream));
    CUDA(cudaEventSynchronize(event));
    // A new context has the variables' first values.
    for (int i = 0; i < n; i++) REQUIRE(host[i] == i * 2 + 5 + 11);
    work<<<1, 1, 0, stream>>>(managed, 1);
    CUDA(cudaFreeAsync(p, stream));
    CUDA(cudaStreamSynchronize(stream));
    REQUIRE(*managed == 16);
    CUDA(cudaFree(managed));
    CUDA(cudaEventDestroy(event));
    CUDA(cudaStreamDestroy(stream));
}

int main()
{
    const cudaError_t expected[] = {cudaErrorIllegalAddress, cudaErrorMisalignedAddress, cudaErrorLaunchFailure,
                                    cudaErrorAssert, cudaErrorIllegalAddress};
    // The assertion's message goes to standard error.
    for (int kind = 0; kind < 5; kind++) {
        works();
        leave_behind();
        int *flag, *device_flag;
        CUDA(cudaHostAlloc(&flag, 4, cudaHostAllocMapped));
        *flag = 0;
        CUDA(cudaHostGetDevicePointer(&device_flag, flag, 0));
        cudaError_t found = fault(kind, device_flag);
        if (found != expected[kind]) {
            std::printf("fault %d: %s\n", kind, cudaGetErrorName(found));
            return 1;
        }
        // It sticks, whatever is called, until the reset.
        int *p;
        REQUIRE(cudaMalloc(&p, 4) == found);
        REQUIRE(cudaStreamSynchronize(0) == found);
        REQUIRE(cudaGetLastError() == found && cudaDeviceSynchronize() == found);
        CUDA(cudaDeviceReset());
        cudaGetLastError(); // the runtime's own note of the last error outlives the context
        cudaStream_t stream;
        if (cudaStreamCreate(&stream) == cudaErrorDevicesUnavailable)
            OK("%s, and no device for this process after the reset", cudaGetErrorName(found));
        CUDA(cudaGetLastError());
        CUDA(cudaStreamDestroy(stream));
    }
    works();
    // The driver's own call, with the context retained anew.
    CUdevice device;
    CUcontext context;
    REQUIRE(fault(0, nullptr) == cudaErrorIllegalAddress);
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxReset(device));
    DRIVER(cuDevicePrimaryCtxRetain(&context, device));
    DRIVER(cuCtxSetCurrent(context));
    DRIVER(cuCtxSynchronize());
    cudaGetLastError();
    works();
    OK("6 faults, 6 resets");
}
