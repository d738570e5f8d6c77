// Two devices: separate memory, peer access where there is any, peer copies, events across devices.
// devices: 2
#include "check.h"

__global__ void fill(int *p, int n, int base)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = base + i;
}

__global__ void add(int *p, const int *other, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += other[i];
}

__global__ void late(int *p)
{
    for (int turn = 0; turn < 200; turn++) __nanosleep(100000);
    *p = 1;
}

__device__ int counted;

__global__ void count()
{
    counted += 1;
}

// What a copy that is not asynchronous waits for, whichever device is current: the streams of both
// devices that block, and no other.
void ordered(int *a, int *b)
{
    for (int turn = 0; turn < 16; turn++) {
        const int source = turn & 1, busy = turn >> 1 & 1, current = turn >> 2 & 1;
        const bool shaped = turn >> 3 & 1;
        int *from = source ? b : a, *to = source ? a : b, *late_at = busy ? b : a, got = 0;
        cudaStream_t stream;
        for (int device : {0, 1}) {
            CUDA(cudaSetDevice(device));
            CUDA(cudaMemset(device ? b : a, 0, 4));
            CUDA(cudaDeviceSynchronize());
        }
        CUDA(cudaSetDevice(busy));
        CUDA(cudaStreamCreate(&stream));
        late<<<1, 1, 0, stream>>>(late_at);
        CUDA(cudaSetDevice(current));
        if (!shaped) {
            CUDA(cudaMemcpyPeer(to, !source, from, source, 4));
        } else {
            cudaMemcpy3DPeerParms plane = {};
            plane.srcPtr = make_cudaPitchedPtr(from, 4, 1, 1);
            plane.dstPtr = make_cudaPitchedPtr(to, 4, 1, 1);
            plane.srcDevice = source;
            plane.dstDevice = !source;
            plane.extent = make_cudaExtent(4, 1, 1);
            CUDA(cudaMemcpy3DPeer(&plane));
        }
        CUDA(cudaMemcpy(&got, to, 4, cudaMemcpyDeviceToHost));
        // What the kernel has written came before: at the source it is copied, else overwritten.
        REQUIRE(got == (busy == source));
        CUDA(cudaStreamSynchronize(stream));
        CUDA(cudaMemcpy(&got, late_at, 4, cudaMemcpyDeviceToHost));
        REQUIRE(got == (busy == source));
        CUDA(cudaStreamDestroy(stream));
    }
}

__global__ void spin(volatile int *gate)
{
    while (*gate == 0) {}
}

// A stream that does not block holds up no copy, even if it never ends.
void beside(int *a, int *b)
{
    volatile int *gate;
    cudaStream_t stream;
    CUDA(cudaHostAlloc((void **)&gate, 64, cudaHostAllocMapped));
    *gate = 0;
    CUDA(cudaSetDevice(1));
    PRELOAD(spin);
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    spin<<<1, 1, 0, stream>>>(gate);
    CUDA(cudaMemcpyPeer(a, 0, b, 1, 4));
    CUDA(cudaMemcpyPeer(b, 1, a, 0, 4));
    EXPECT(cudaErrorNotReady, cudaStreamQuery(stream));
    *gate = 1;
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamDestroy(stream));
    CUDA(cudaFreeHost((void *)gate));
}

int main()
{
    const int n = 50000, blocks = (n + 255) / 256;
    int devices;
    CUDA(cudaGetDeviceCount(&devices));
    REQUIRE(devices == 2);
    int *a, *b, can;
    cudaStream_t sa, sb;
    cudaEvent_t done;
    CUDA(cudaSetDevice(0));
    CUDA(cudaMalloc(&a, n * 4));
    CUDA(cudaStreamCreate(&sa));
    CUDA(cudaEventCreate(&done));
    fill<<<blocks, 256, 0, sa>>>(a, n, 1000);
    CUDA(cudaEventRecord(done, sa));
    CUDA(cudaSetDevice(1));
    CUDA(cudaMalloc(&b, n * 4));
    CUDA(cudaStreamCreate(&sb));
    CUDA(cudaStreamWaitEvent(sb, done, 0));
    CUDA(cudaMemcpyPeerAsync(b, 1, a, 0, n * 4, sb));
    CUDA(cudaDeviceCanAccessPeer(&can, 1, 0));
    int *other = a;
    if (can) {
        CUDA(cudaDeviceEnablePeerAccess(0, 0));
        EXPECT(cudaErrorPeerAccessAlreadyEnabled, cudaDeviceEnablePeerAccess(0, 0));
    } else {
        EXPECT(cudaErrorPeerAccessUnsupported, cudaDeviceEnablePeerAccess(0, 0));
        CUDA(cudaMalloc(&other, n * 4));
        CUDA(cudaMemcpyPeerAsync(other, 1, a, 0, n * 4, sb));
    }
    (void)cudaGetLastError();
    add<<<blocks, 256, 0, sb>>>(b, other, n);
    std::vector<int> got(n);
    CUDA(cudaMemcpyAsync(got.data(), b, n * 4, cudaMemcpyDeviceToHost, sb));
    CUDA(cudaStreamSynchronize(sb));
    for (int i = 0; i < n; i++) REQUIRE(got[i] == 2 * (1000 + i));
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, b));
    REQUIRE(attributes.device == 1 && attributes.type == cudaMemoryTypeDevice);
    // A kernel runs on the stream's device, whichever is current: its variables are that one's.
    count<<<1, 1, 0, sa>>>();
    CUDA(cudaGetLastError());
    CUDA(cudaStreamSynchronize(sa));
    for (int device : {1, 0}) {
        int times;
        CUDA(cudaSetDevice(device));
        CUDA(cudaMemcpyFromSymbol(&times, counted, 4));
        REQUIRE(times == !device);
    }
    CUDA(cudaSetDevice(1));
    ordered(a, b);
    beside(a, b);
    CUDA(cudaSetDevice(1));
    if (!can) CUDA(cudaFree(other));
    CUDA(cudaFree(b));
    CUDA(cudaFree(a));
    OK("%d ints over", n);
}
