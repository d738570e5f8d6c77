// Managed memory that is attached to the host or to one stream is touched by the host while kernels
// of other streams run, which wait for the host.
#include "check.h"

__global__ void wait_for(volatile int *go)
{
    while (!*go) {}
}

__global__ void add(int *p, int n, int by)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] += by;
}

constexpr int N = 5000;

static int *made(cudaStream_t stream, unsigned flags)
{
    int *p;
    CUDA(cudaMallocManaged(&p, N * sizeof(int)));
    CUDA(cudaStreamAttachMemAsync(stream, p, 0, flags));
    CUDA(cudaStreamSynchronize(stream));
    return p;
}

static void has(const int *p, int plus)
{
    for (int i = 0; i < N; i++) REQUIRE(p[i] == i + plus);
}

int main()
{
    cudaStream_t busy, own;
    CUDA(cudaStreamCreateWithFlags(&busy, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking));
    PRELOAD(wait_for);
    PRELOAD(add);
    int *go;
    CUDA(cudaMallocHost(&go, sizeof *go));
    int *streams = made(own, cudaMemAttachSingle), *hosts = made(own, cudaMemAttachHost);
    for (int round = 0; round < 3; round++) {
        *(volatile int *)go = 0;
        wait_for<<<1, 1, 0, busy>>>(go);
        // What came to be while a kernel ran is nobody's either.
        int *late = made(own, cudaMemAttachSingle);
        for (int i = 0; i < N; i++) streams[i] = hosts[i] = late[i] = i;
        add<<<1, 128, 0, own>>>(streams, N, round);
        add<<<1, 128, 0, own>>>(late, N, 2 * round);
        CUDA(cudaStreamSynchronize(own));
        has(streams, round);
        has(hosts, 0);
        has(late, 2 * round);
        *(volatile int *)go = 1;
        CUDA(cudaStreamSynchronize(busy));
        CUDA(cudaFree(late));
    }
    // It is everybody's again when its stream is destroyed, and the host's is when it is attached
    // to all.
    CUDA(cudaStreamDestroy(own));
    CUDA(cudaStreamAttachMemAsync(busy, hosts, 0, cudaMemAttachGlobal));
    add<<<1, 128, 0, busy>>>(streams, N, 10);
    add<<<1, 128, 0, busy>>>(hosts, N, 20);
    CUDA(cudaStreamSynchronize(busy));
    has(streams, 2 + 10);
    has(hosts, 20);
    CUDA(cudaFree(streams));
    CUDA(cudaFree(hosts));
    CUDA(cudaFreeHost(go));
    CUDA(cudaStreamDestroy(busy));
    OK("attached");
}
