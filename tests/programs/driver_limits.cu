// Launches that cannot run are refused by the call itself, and what follows runs.
// build: {cuda}
#include "check.h"
#include <cuda.h>

__global__ void count(int *n) { atomicAdd(n, 1); }
__global__ void __launch_bounds__(64) bounded(int *n) { atomicAdd(n, 1); }
extern __shared__ int dynamic[];
__global__ void shared(int *n) { dynamic[threadIdx.x] = 1; __syncthreads(); atomicAdd(n, dynamic[threadIdx.x]); }

static CUfunction function(const void *kernel)
{
    cudaFunction_t function;
    CUDA(cudaGetFuncBySymbol(&function, kernel));
    return function;
}

int main()
{
    int *n;
    CUDA(cudaMalloc(&n, 4));
    CUDA(cudaMemset(n, 0, 4));
    void *params[] = {&n};
    CUfunction f = function((void *)count), b = function((void *)bounded), s = function((void *)shared);
    auto launch = [&](CUfunction k, unsigned gx, unsigned gy, unsigned bx, unsigned by, unsigned bytes, void **p) {
        return cuLaunchKernel(k, gx, gy, 1, bx, by, 1, bytes, nullptr, p, nullptr);
    };
    REQUIRE(launch(f, 0, 1, 1, 1, 0, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch(f, 1, 1, 0, 1, 0, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch(f, 1, 1, 1025, 1, 0, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch(f, 1, 1, 1024, 2, 0, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch(f, 1, 65536, 1, 1, 0, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(launch(f, 1, 1, 1, 1, 1 << 30, params) == CUDA_ERROR_INVALID_VALUE);
    int most;
    DRIVER(cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, b));
    REQUIRE(most == 64);
    REQUIRE(launch(b, 1, 1, 65, 1, 0, params) != CUDA_SUCCESS);
    DRIVER(launch(b, 1, 1, 64, 1, 0, params));

    int optin, standard, device = 0;
    DRIVER(cuDeviceGetAttribute(&standard, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device));
    DRIVER(cuDeviceGetAttribute(&optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device));
    REQUIRE(launch(s, 1, 1, 32, 1, standard + 4, params) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(cuFuncSetAttribute(s, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, optin + 1) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuFuncSetAttribute(s, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, optin));
    DRIVER(launch(s, 1, 1, 32, 1, optin, params));

    int blocks, processors;
    DRIVER(cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, f, 256, 0));
    DRIVER(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    REQUIRE(cuLaunchCooperativeKernel(f, blocks * processors + 1, 1, 1, 256, 1, 1, 0, nullptr, params)
            == CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    DRIVER(cuLaunchCooperativeKernel(f, 1, 1, 1, 256, 1, 1, 0, nullptr, params));
    int got;
    CUDA(cudaMemcpy(&got, n, 4, cudaMemcpyDeviceToHost));
    REQUIRE(got == 64 + 32 + 256);
    count<<<1, 2048>>>(n);
    cudaError_t refused = cudaGetLastError(); // runtimes before 13 name the configuration
    REQUIRE(refused == cudaErrorInvalidConfiguration || refused == cudaErrorInvalidValue);
    CUDA(cudaGetLastError());
    CUDA(cudaDeviceSynchronize());
    OK("refused and went on");
}
