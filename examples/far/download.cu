// Makes pseudo-random blocks on the device and reads them back: bytes from the device.
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void make(unsigned *out, int n, unsigned seed) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        out[i] = (i + seed) * 2654435761u ^ seed << 7;
}

int main(int argc, char **argv) {
    int blocks = argc > 1 ? atoi(argv[1]) : 24, n = 1 << 19, wrong = 0;
    std::vector<unsigned> host(n);
    unsigned *out;
    cudaMalloc(&out, n * 4);
    for (unsigned b = 0; b < (unsigned)blocks; b++) {
        make<<<16, 128>>>(out, n, b);
        if (cudaMemcpy(host.data(), out, n * 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
        for (int i = 0; i < n; i += 1021) wrong += host[i] != ((i + b) * 2654435761u ^ b << 7);
    }
    printf("%d blocks, %d wrong\n", blocks, wrong);
    return wrong != 0;
}
