// a·x + y of vectors in the host's memory, block by block: bytes to the device and back.
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void saxpy(float a, const float *x, float *y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}

int main(int argc, char **argv) {
    int blocks = argc > 1 ? atoi(argv[1]) : 12, n = 1 << 18, wrong = 0;
    std::vector<float> x(n), y(n);
    float *dx, *dy;
    cudaMalloc(&dx, n * 4), cudaMalloc(&dy, n * 4);
    for (int b = 0; b < blocks; b++) {
        for (int i = 0; i < n; i++) x[i] = i % 97, y[i] = i % 31 + b;
        cudaMemcpy(dx, x.data(), n * 4, cudaMemcpyHostToDevice);
        cudaMemcpy(dy, y.data(), n * 4, cudaMemcpyHostToDevice);
        saxpy<<<n / 128, 128>>>(2, dx, dy, n);
        if (cudaMemcpy(y.data(), dy, n * 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
        for (int i = 0; i < n; i += 101) wrong += y[i] != 2.0f * (i % 97) + i % 31 + b;
    }
    printf("%d blocks, %d wrong\n", blocks, wrong);
    return wrong != 0;
}
