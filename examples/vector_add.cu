// Adds two vectors on the GPU and checks every element on the host.
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CUDA(call)                                                                       \
    do {                                                                                 \
        cudaError_t status = (call);                                                     \
        if (status != cudaSuccess) {                                                     \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));         \
            std::exit(1);                                                                \
        }                                                                                \
    } while (0)

__global__ void add(const float *a, const float *b, float *sum, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

int main()
{
    const int n = 1 << 20;
    const size_t bytes = n * sizeof(float);
    std::vector<float> a(n), b(n), sum(n);
    for (int i = 0; i < n; i++) {
        a[i] = 0.5f * i;
        b[i] = 1.0f + i;
    }

    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    std::printf("device: %s, compute capability %d.%d\n", device.name, device.major, device.minor);

    float *d_a, *d_b, *d_sum;
    CUDA(cudaMalloc(&d_a, bytes));
    CUDA(cudaMalloc(&d_b, bytes));
    CUDA(cudaMalloc(&d_sum, bytes));
    CUDA(cudaMemcpy(d_a, a.data(), bytes, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(d_b, b.data(), bytes, cudaMemcpyHostToDevice));
    add<<<(n + 255) / 256, 256>>>(d_a, d_b, d_sum, n);
    CUDA(cudaGetLastError());
    CUDA(cudaMemcpy(sum.data(), d_sum, bytes, cudaMemcpyDeviceToHost));
    CUDA(cudaFree(d_a));
    CUDA(cudaFree(d_b));
    CUDA(cudaFree(d_sum));

    for (int i = 0; i < n; i++) {
        if (sum[i] != a[i] + b[i]) {
            std::fprintf(stderr, "wrong at %d: %g, not %g\n", i, sum[i], a[i] + b[i]);
            return 1;
        }
    }
    std::printf("%d sums, all right\n", n);
    return 0;
}
