// Virtual memory management: reserve, create, map, set access, grow in place, map elsewhere.
// build: {cuda}
#include "check.h"
#include <cuda.h>

__global__ void fill(int *p, size_t n)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = int(i) ^ 0x55;
}

int main()
{
    CUDA(cudaFree(nullptr));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t chunk;
    prop.location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    DRIVER(cuMemGetAllocationGranularity(&chunk, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    REQUIRE(chunk > 0);
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    DRIVER(cuMemGetAllocationGranularity(&chunk, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUdeviceptr base, other;
    DRIVER(cuMemAddressReserve(&base, 4 * chunk, 0, 0, 0));
    CUmemGenericAllocationHandle handle[2];
    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    for (int i = 0; i < 2; i++) {
        DRIVER(cuMemCreate(&handle[i], chunk, &prop, 0));
        DRIVER(cuMemMap(base + i * chunk, chunk, 0, handle[i], 0));
        DRIVER(cuMemSetAccess(base + i * chunk, chunk, &access, 1));
    }
    size_t n = 2 * chunk / 4;
    fill<<<32, 256>>>((int *)base, n);
    CUDA(cudaDeviceSynchronize());
    std::vector<int> got(n);
    CUDA(cudaMemcpy(got.data(), (void *)base, n * 4, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n; i++) REQUIRE(got[i] == (int(i) ^ 0x55));
    // The second chunk, mapped at another place, keeps what it holds.
    DRIVER(cuMemUnmap(base + chunk, chunk));
    DRIVER(cuMemAddressReserve(&other, chunk, 0, 0, 0));
    DRIVER(cuMemMap(other, chunk, 0, handle[1], 0));
    DRIVER(cuMemSetAccess(other, chunk, &access, 1));
    std::vector<int> moved(n / 2);
    CUDA(cudaMemcpy(moved.data(), (void *)other, chunk, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n / 2; i++) REQUIRE(moved[i] == got[n / 2 + i]);
    DRIVER(cuMemUnmap(base, chunk));
    DRIVER(cuMemUnmap(other, chunk));
    for (auto h : handle) DRIVER(cuMemRelease(h));
    DRIVER(cuMemAddressFree(base, 4 * chunk));
    DRIVER(cuMemAddressFree(other, chunk));
    OK("chunks of %zu", chunk);
}
