// Counts steps in physical memory of its own (cuMemCreate), mapped at two addresses: a kernel writes at one and reads at
// the other. Compared with what the host computes. Prints as gpu_steps does. Usage: gpu_mapped STEPS MILLISECONDS
#include "../programs/check.h"
#include <cstdint>
#include <cuda.h>
#include <sys/random.h>
#include <time.h>

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
    int steps = argc > 1 ? atoi(argv[1]) : 100, between = argc > 2 ? atoi(argv[2]) : 5;
    uint32_t nonce = 0, *sum, seen, weights = 0, expected = 0;
    if (getrandom(&nonce, sizeof nonce, 0) != sizeof nonce) return 2;
    std::printf("nonce %08x\n", nonce);
    std::fflush(stdout);
    CUDA(cudaMalloc(&sum, sizeof *sum));
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    CUmemGenericAllocationHandle handle;
    DRIVER(cuMemCreate(&handle, BYTES, &prop, 0));
    CUdeviceptr first = map(handle), second = map(handle);
    CUDA(cudaMemset((void *)first, 0, BYTES));
    for (uint32_t i = 0; i < N; i++) weights += i % 7 + 1;
    for (int number = 1; number <= steps; number++) {
        CUDA(cudaMemset(sum, 0, sizeof *sum));
        step<<<64, 256>>>((uint32_t *)first, (const uint32_t *)second, sum, number);
        CUDA(cudaMemcpy(&seen, sum, sizeof seen, cudaMemcpyDeviceToHost));
        expected += number * weights;
        if (seen != expected) {
            std::printf("%08x: step %d is wrong\n", nonce, number);
            return 1;
        }
        std::printf("%08x %d\n", nonce, number);
        std::fflush(stdout);
        timespec time = {between / 1000, (between % 1000) * 1000000L};
        nanosleep(&time, nullptr);
    }
    std::printf("%08x well\n", nonce);
    return 7;
}
