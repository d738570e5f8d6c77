// Jacobi's method on a square, which reads its residual back after every sweep: calls that wait.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

__global__ void sweep(const float *in, float *out, int n, int *change) {
    int x = blockIdx.x * blockDim.x + threadIdx.x + 1, y = blockIdx.y * blockDim.y + threadIdx.y + 1;
    if (x > n || y > n) return;
    int w = n + 2, i = y * w + x;
    out[i] = 0.25f * (in[i - 1] + in[i + 1] + in[i - w] + in[i + w]);
    atomicMax(change, __float_as_int(fabsf(out[i] - in[i])));
}

int main(int argc, char **argv) {
    int sweeps = argc > 1 ? atoi(argv[1]) : 2000, n = 64, w = n + 2, bits = 0;
    std::vector<float> host(w * w, 0);
    std::fill(host.begin(), host.begin() + w, 1.0f);
    float *a, *b;
    int *change;
    cudaMalloc(&a, host.size() * 4), cudaMalloc(&b, host.size() * 4), cudaMalloc(&change, 4);
    cudaMemcpy(a, host.data(), host.size() * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(b, host.data(), host.size() * 4, cudaMemcpyHostToDevice);
    for (int i = 0; i < sweeps; i++, std::swap(a, b)) {
        cudaMemset(change, 0, 4);
        sweep<<<dim3(n / 16, n / 16), dim3(16, 16)>>>(a, b, n, change);
        if (cudaMemcpy(&bits, change, 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
    }
    cudaMemcpy(host.data(), a, host.size() * 4, cudaMemcpyDeviceToHost);
    float middle = host[(n / 2) * w + n / 2];
    printf("%d sweeps, middle %.4f\n", sweeps, middle);
    return sweeps >= 2000 && (middle < 0.2f || middle > 0.25f);
}
