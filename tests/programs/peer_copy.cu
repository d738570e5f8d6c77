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

// A copy that is not asynchronous comes after all work of both devices, whichever is current.
void serialized(int *a, int *b)
{
    const int devices[] = {1, 0};
    for (int device : devices) {
        int *at = device ? b : a, *other = device ? a : b, got = 0;
        cudaStream_t stream;
        CUDA(cudaSetDevice(device));
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        CUDA(cudaMemset(at, 0, 4));
        CUDA(cudaDeviceSynchronize());
        late<<<1, 1, 0, stream>>>(at);
        CUDA(cudaSetDevice(!device));
        if (device) {
            CUDA(cudaMemcpyPeer(other, !device, at, device, 4));
        } else {
            cudaMemcpy3DPeerParms plane = {};
            plane.srcPtr = make_cudaPitchedPtr(at, 4, 1, 1);
            plane.dstPtr = make_cudaPitchedPtr(other, 4, 1, 1);
            plane.srcDevice = device;
            plane.dstDevice = !device;
            plane.extent = make_cudaExtent(4, 1, 1);
            CUDA(cudaMemcpy3DPeer(&plane));
        }
        CUDA(cudaMemcpy(&got, other, 4, cudaMemcpyDeviceToHost));
        REQUIRE(got == 1);
        CUDA(cudaStreamDestroy(stream));
    }
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
    serialized(a, b);
    if (!can) CUDA(cudaFree(other));
    CUDA(cudaFree(b));
    CUDA(cudaFree(a));
    OK("%d ints over", n);
}
