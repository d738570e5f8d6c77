// The occupancy calculator agrees with the limits that the device reports.
#include "check.h"

__global__ void architecture(int *arch)
{
#ifdef __CUDA_ARCH__
    *arch = __CUDA_ARCH__;
#endif
}
__global__ void light(int *p) { p[threadIdx.x] = 1; }
__global__ void __launch_bounds__(128) bounded(int *p) { p[threadIdx.x] = 1; }
__global__ void heavy(int *p)
{
    __shared__ int s[8192];
    for (int i = threadIdx.x; i < 8192; i += blockDim.x) s[i] = i;
    __syncthreads();
    p[threadIdx.x] = s[threadIdx.x * 3 % 8192];
}

int main()
{
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    int grid, block, blocks;
    CUDA(cudaOccupancyMaxPotentialBlockSize(&grid, &block, light, 0, 0));
    REQUIRE(block > 0 && block <= device.maxThreadsPerBlock && block % 32 == 0 && grid >= device.multiProcessorCount);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, light, 256, 0));
    REQUIRE(blocks >= 1 && blocks * 256 <= device.maxThreadsPerMultiProcessor);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, heavy, 64, 0));
    REQUIRE(blocks >= 1 && blocks * 32768 <= int(device.sharedMemPerMultiprocessor));
    cudaFuncAttributes attributes;
    CUDA(cudaFuncGetAttributes(&attributes, heavy));
    REQUIRE(attributes.sharedSizeBytes == 32768 && attributes.maxThreadsPerBlock <= 1024 && attributes.numRegs > 0);
    CUDA(cudaFuncGetAttributes(&attributes, bounded));
    REQUIRE(attributes.maxThreadsPerBlock == 128);
    Device<int> d(1024);
    // What CUB picks its kernels' tuning by: without it every Thrust algorithm fails.
    architecture<<<1, 1>>>(d);
    int arch;
    CUDA(cudaMemcpy(&arch, d, sizeof arch, cudaMemcpyDeviceToHost));
    CUDA(cudaFuncGetAttributes(&attributes, architecture));
    REQUIRE(attributes.ptxVersion * 10 == arch && attributes.binaryVersion * 10 >= arch);
    bounded<<<1, 256>>>(d);
    REQUIRE(cudaGetLastError() != cudaSuccess);
    light<<<1, block>>>(d);
    CUDA(cudaDeviceSynchronize());
    OK("block %d", block);
}
