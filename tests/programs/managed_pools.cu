// A pool of managed memory: host and device share what comes from it, in a stream's order.
#include "check.h"
#include <chrono>
#include <thread>

__global__ void add(int *p, int n, int by)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += by;
}

int main()
{
#if CUDART_VERSION < 13000
    OK("no pools of managed memory before CUDA 13");
#else
    int concurrent;
    CUDA(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, 0));
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypeManaged;
    props.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool;
    if (!concurrent) {
        EXPECT(cudaErrorNotSupported, cudaMemPoolCreate(&pool, &props));
        // It is to be met while it runs, also where it has nothing to do.
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        OK("managed memory that both sides access at once is not supported here");
    }
    // Neither a size of its own nor handles for other processes.
    props.maxSize = 1 << 20;
    EXPECT(cudaErrorInvalidValue, cudaMemPoolCreate(&pool, &props));
    props.maxSize = 0;
    props.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    REQUIRE(cudaMemPoolCreate(&pool, &props) != cudaSuccess);
    props.handleTypes = cudaMemHandleTypeNone;
    CUDA(cudaMemPoolCreate(&pool, &props));

    const int n = 10000;
    int *p[3];
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    for (auto &each : p) CUDA(cudaMallocFromPoolAsync((void **)&each, n * sizeof(int), pool, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (auto each : p) {
        cudaPointerAttributes of;
        CUDA(cudaPointerGetAttributes(&of, each));
        REQUIRE(of.type == cudaMemoryTypeManaged);
        for (int i = 0; i < n; i++) each[i] = i;
        add<<<8, 128, 0, stream>>>(each, n, 5);
    }
    CUDA(cudaStreamSynchronize(stream));
    for (auto each : p) for (int i = 0; i < n; i++) REQUIRE(each[i] == i + 5);
    uint64_t used;
    CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used));
    REQUIRE(used >= 3 * n * sizeof(int));

    // One freed in order behind work, one by cudaFree; the last outlives the pool's handle.
    add<<<8, 128, 0, stream>>>(p[0], n, 1);
    CUDA(cudaFreeAsync(p[0], stream));
    CUDA(cudaFree(p[1]));
    CUDA(cudaStreamSynchronize(stream));
    uint64_t left;
    CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &left));
    REQUIRE(left < used && left >= n * sizeof(int));
    CUDA(cudaMemPoolDestroy(pool));
    p[2][0] = 7;
    add<<<8, 128, 0, stream>>>(p[2], n, 1);
    CUDA(cudaStreamSynchronize(stream));
    REQUIRE(p[2][0] == 8);
    CUDA(cudaFreeAsync(p[2], stream));
    CUDA(cudaStreamSynchronize(stream));
    OK("3 x %d ints", n);
#endif
}
