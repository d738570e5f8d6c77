// Mapped host memory: a kernel works on it directly, a running kernel sees the host's store.
#include "check.h"

__global__ void add(const float *a, const float *b, float *c, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

__global__ void wait_for(volatile int *flag, int *seen)
{
    while (*flag == 0) {}
    *seen = *flag;
    __threadfence_system();
}

int main()
{
    const int n = 10000;
    float *a, *b, *c, *da, *db, *dc;
    for (float **p : {&a, &b, &c}) CUDA(cudaHostAlloc(p, n * sizeof(float), cudaHostAllocMapped));
    CUDA(cudaHostGetDevicePointer(&da, a, 0));
    CUDA(cudaHostGetDevicePointer(&db, b, 0));
    CUDA(cudaHostGetDevicePointer(&dc, c, 0));
    for (int i = 0; i < n; i++) a[i] = i, b[i] = 0.5f * i;
    add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(c[i] == 1.5f * i);

    volatile int *flag;
    CUDA(cudaHostAlloc((void **)&flag, 2 * sizeof(int), cudaHostAllocMapped));
    flag[0] = flag[1] = 0;
    wait_for<<<1, 1>>>(flag, (int *)flag + 1);
    EXPECT(cudaErrorNotReady, cudaStreamQuery(0));
    flag[0] = 42;
    CUDA(cudaDeviceSynchronize());
    REQUIRE(flag[1] == 42);
    for (void *p : {(void *)a, (void *)b, (void *)c, (void *)flag}) CUDA(cudaFreeHost(p));
    OK("%d sums, one flag", n);
}
