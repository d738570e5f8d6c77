// The largest eigenvalue of a matrix by repeated products; the host scales the vector: small copies
// both ways in every step.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void product(const float *a, const float *x, float *y, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    float sum = 0;
    for (int k = 0; k < n; k++) sum += a[k * n + row] * x[k];
    y[row] = sum;
}

int main(int argc, char **argv) {
    int steps = argc > 1 ? atoi(argv[1]) : 600, n = 128;
    std::vector<float> a(n * n), x(n, 1), y(n);
    for (int i = 0; i < n; i++)
        for (int k = 0; k < n; k++) a[i * n + k] = i == k ? 4 : abs(i - k) == 1 ? 1 : 0;
    float *da, *dx, *dy, norm = 0;
    cudaMalloc(&da, n * n * 4), cudaMalloc(&dx, n * 4), cudaMalloc(&dy, n * 4);
    cudaMemcpy(da, a.data(), n * n * 4, cudaMemcpyHostToDevice);
    for (int s = 0; s < steps; s++) {
        cudaMemcpy(dx, x.data(), n * 4, cudaMemcpyHostToDevice);
        product<<<(n + 63) / 64, 64>>>(da, dx, dy, n);
        if (cudaMemcpy(y.data(), dy, n * 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
        norm = 0;
        for (float v : y) norm += v * v;
        norm = sqrtf(norm);
        for (int i = 0; i < n; i++) x[i] = y[i] / norm;
    }
    printf("%d steps, eigenvalue %.4f\n", steps, norm);
    return steps >= 600 && fabsf(norm - 6) > 0.01f;
}
