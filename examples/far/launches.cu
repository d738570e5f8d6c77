// Many small kernels in a row and one wait: posts.
#include <cstdio>
#include <cstdlib>

__global__ void add(unsigned *to, unsigned value) {
    if (threadIdx.x == 0) *to += value;
}

int main(int argc, char **argv) {
    int launches = argc > 1 ? atoi(argv[1]) : 50000;
    unsigned *total, got = 0, expected = 0;
    cudaMalloc(&total, 4), cudaMemset(total, 0, 4);
    for (int i = 0; i < launches; i++) add<<<1, 32>>>(total, i), expected += i;
    if (cudaMemcpy(&got, total, 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
    printf("%d launches, total %u\n", launches, got);
    return got != expected;
}
