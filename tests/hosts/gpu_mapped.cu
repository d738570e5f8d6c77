// Counts steps in physical memory of its own (cuMemCreate), mapped at two addresses: a kernel
// writes at one and reads at the other. Compared with what the host computes. Prints as gpu_steps
// does. Usage: gpu_mapped STEPS MILLISECONDS
#include "steps.h"
#include <cuda.h>

constexpr size_t BYTES = 8 << 20;
constexpr uint32_t N = BYTES / sizeof(uint32_t);

__global__ void step(uint32_t *write, const uint32_t *read, uint32_t *sum, uint32_t number)
{
    uint32_t all = 0;
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < N; i += gridDim.x * blockDim.x) {
        write[i] = read[i] + number * (i % 7 + 1);
        all += write[i];
    }
    atomicAdd(sum, all);
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle)
{
    CUdeviceptr address;
    DRIVER(cuMemAddressReserve(&address, BYTES, 0, 0, 0));
    DRIVER(cuMemMap(address, BYTES, 0, handle, 0));
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER(cuMemSetAccess(address, BYTES, &access, 1));
    return address;
}

int main(int argc, char **argv)
{
    uint32_t *sum, seen, weights = 0, expected = 0;
    Steps steps(argc, argv, 100);
    CUDA(cudaMalloc(&sum, sizeof *sum));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    DRIVER(cuMemCreate(&handle, BYTES, &prop, 0));
    CUdeviceptr first = map(handle), second = map(handle);
    CUDA(cudaMemset((void *)first, 0, BYTES));
    for (uint32_t i = 0; i < N; i++) weights += i % 7 + 1;
    for (uint32_t number = 1; number <= steps.count; number++) {
        CUDA(cudaMemset(sum, 0, sizeof *sum));
        step<<<64, 256>>>((uint32_t *)first, (const uint32_t *)second, sum, number);
        CUDA(cudaMemcpy(&seen, sum, sizeof seen, cudaMemcpyDeviceToHost));
        expected += number * weights;
        if (seen != expected) {
            std::printf("%08x: step %u is wrong\n", steps.nonce, number);
            return 1;
        }
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
