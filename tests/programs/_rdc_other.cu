// The other half of rdc.cu.
__device__ int counter = 100;
__constant__ float factors[4] = {0.0f, 0.5f, 1.0f, 1.5f};
__device__ __noinline__ int twice(int x) { return 2 * x; }
extern __device__ int own(int x);

// The same name as in the other file: each its own.
static __device__ __noinline__ int seven() { return 7; }
__global__ void other(int *p)
{
    p[threadIdx.x] = own(threadIdx.x) + seven();
}
