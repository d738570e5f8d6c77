// A kernel that is launched, and one of a template: what `kedge explain` lists.
#include <cstdio>

__device__ __noinline__ int twice(int x) { return 2 * x; }

__global__ void fill(int *p) { p[threadIdx.x] = twice(threadIdx.x); }

template <typename T> __global__ void clear(T *p) { p[threadIdx.x] = 0; }

int main()
{
    int *p = nullptr, last = 0;
    cudaMalloc(&p, 32 * sizeof *p);
    clear<float><<<1, 32>>>(reinterpret_cast<float *>(p));
    fill<<<1, 32>>>(p);
    cudaError_t error = cudaMemcpy(&last, p + 31, sizeof last, cudaMemcpyDeviceToHost);
    printf("%d\n", last);
    return error == cudaSuccess && last == 62 ? 0 : 1;
}
