// Kernels that launch kernels: recursion over a range, and a parent that ends after its children.
// build: -rdc=true -lcudadevrt
#include "check.h"

__global__ void fill(int *p, int from, int to, int depth)
{
    if (to - from <= 16) {
        for (int i = from + threadIdx.x; i < to; i += blockDim.x) p[i] = i * 10 + depth;
        return;
    }
    if (threadIdx.x == 0) {
        int middle = (from + to) / 2;
        fill<<<1, 8>>>(p, from, middle, depth + 1);
        fill<<<1, 8>>>(p, middle, to, depth + 1);
    }
}

__global__ void each(int *p, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) p[i] += 1; }

__global__ void parent(int *p, int n)
{
    if (threadIdx.x == 0) {
        for (int r = 0; r < 5; r++) each<<<(n + 63) / 64, 64>>>(p, n);
    }
}

// Copies and fills by a kernel, in the order of its streams.
// What its calls return goes to `told`.
__global__ void mover(int *from, int *to, int n, int *told)
{
    if (threadIdx.x == 0) {
        each<<<(n + 63) / 64, 64>>>(from, n);
        told[0] = cudaMemcpyAsync(to, from, n * sizeof(int), cudaMemcpyDeviceToDevice, 0);
        each<<<(n + 63) / 64, 64>>>(to, n);
        // With 0: natively (driver 580) kernels' fills were seen to write 0 whatever their value.
        told[1] = cudaMemsetAsync(to + n, 0, n * sizeof(int), 0);
        cudaStream_t side;
        told[2] = cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking);
        each<<<(n + 63) / 64, 64, 0, side>>>(to + 2 * n, n);
        told[3] = cudaStreamDestroy(side);
    }
}

int main()
{
    const int n = 256;
    Device<int> d(n);
    CUDA(cudaMemset(d, 0, n * 4));
    fill<<<1, 8>>>(d, 0, n, 0);
    CUDA(cudaGetLastError());
    parent<<<1, 32>>>(d, n);
    CUDA(cudaDeviceSynchronize());
    auto got = d.host();
    for (int i = 0; i < n; i++) REQUIRE(got[i] == i * 10 + 4 + 5);
    Device<int> moved(3 * n);
    CUDA(cudaMemset(moved, 0, 3 * n * sizeof(int)));
    CUDA(cudaMemset(moved.data + n, 0x11, n * sizeof(int)));
    Device<int> told(4);
    CUDA(cudaMemset(told, 0xff, 4 * sizeof(int)));
    mover<<<1, 32>>>(d, moved, n, told);
    CUDA(cudaDeviceSynchronize());
    auto calls = told.host();
    for (int i = 0; i < 4; i++) {
        if (calls[i] != cudaSuccess) printf("call %d by the kernel: %s\n", i, cudaGetErrorName((cudaError_t)calls[i]));
    }
    auto both = moved.host();
    for (int i = 0; i < n; i++) {
        if (both[i] != got[i] + 2 || both[n + i] != 0) printf("%d: %d %x\n", i, both[i] - got[i], both[n + i]);
        REQUIRE(both[i] == got[i] + 2);
        REQUIRE(both[n + i] == 0);
        REQUIRE(both[2 * n + i] == 1);
    }
    OK("%d leaves", n / 16);
}
