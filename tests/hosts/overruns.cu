// Kernels that reach beyond their memory, one a case; the comment on its line names the case.
// Usage: overruns CASE
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

template <typename T> __device__ __forceinline__ T twice(const T *from)
{
    return 2 * *from; // inlined
}

__global__ void reads(float *memory, int index)
{
    memory[0] = memory[index]; // reads
}

__global__ void writes(double *memory, int index)
{
    memory[index] = 1; // writes
}

__global__ void adds(unsigned *memory, int index)
{
    atomicAdd(memory + index, 1u); // adds
}

__global__ void shares(int *memory, int index)
{
    __shared__ int shared[64];
    shared[threadIdx.x] = index;
    __syncthreads();
    *memory = shared[index]; // shares
}

__global__ void strays(char *memory, int index)
{
    *memory = (char)*(uint64_t *)(memory + index); // strays
}

__global__ void calls(float *memory, int index)
{
    memory[0] = twice(memory + index);
}

int main(int, char **arguments)
{
    void *memory;
    if (cudaMalloc(&memory, 4000)) return 2;
    switch (atoi(arguments[1])) {
    case 0: reads<<<1, 32>>>((float *)memory, 1000); break;
    case 1: writes<<<1, 1>>>((double *)memory, -2); break;
    case 2: adds<<<1, 32>>>((unsigned *)memory, 1 << 20); break;
    case 3: shares<<<1, 64>>>((int *)memory, 64); break;
    case 4: strays<<<1, 1>>>((char *)memory, 4); break;
    case 5: calls<<<1, 1>>>((float *)memory, 1001); break;
    }
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
}
