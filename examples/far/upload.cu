// Sums blocks of the host's memory: bytes to the device.
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void sum(const unsigned *in, int n, unsigned long long *total) {
    unsigned long long own = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) own += in[i];
    atomicAdd(total, own);
}

int main(int argc, char **argv) {
    int blocks = argc > 1 ? atoi(argv[1]) : 24, n = 1 << 19;
    std::vector<unsigned> host(n);
    unsigned *in;
    unsigned long long *total, expected = 0, got = 0;
    cudaMalloc(&in, n * 4), cudaMalloc(&total, 8), cudaMemset(total, 0, 8);
    for (int b = 0; b < blocks; b++) {
        for (int i = 0; i < n; i++) expected += host[i] = (i * 2654435761u + b) >> 3;
        cudaMemcpy(in, host.data(), n * 4, cudaMemcpyHostToDevice);
        sum<<<16, 128>>>(in, n, total);
    }
    if (cudaMemcpy(&got, total, 8, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
    printf("%d blocks, sum %llu\n", blocks, got);
    return got != expected;
}
