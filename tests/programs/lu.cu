// LU factorisation without pivoting, a column a step: L U gives the matrix back.
#include "check.h"

__global__ void scale(double *a, int n, int k)
{
    int i = k + 1 + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) a[i * n + k] /= a[k * n + k];
}

__global__ void update(double *a, int n, int k)
{
    int i = k + 1 + blockIdx.y * blockDim.y + threadIdx.y, j = k + 1 + blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && j < n) a[i * n + j] -= a[i * n + k] * a[k * n + j];
}

int main()
{
    const int n = 96;
    Random random(17);
    std::vector<double> a(n * n);
    for (int i = 0; i < n * n; i++) a[i] = random.uniform() + (i / n == i % n ? n : 0);
    Device<double> d(a);
    for (int k = 0; k < n - 1; k++) {
        int rest = n - 1 - k;
        scale<<<(rest + 63) / 64, 64>>>(d, n, k);
        update<<<dim3((rest + 15) / 16, (rest + 15) / 16), dim3(16, 16)>>>(d, n, k);
    }
    CUDA(cudaGetLastError());
    auto lu = d.host();
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) {
            double sum = 0;
            for (int k = 0; k <= std::min(i, j); k++) sum += (k == i ? 1 : lu[i * n + k]) * lu[k * n + j];
            REQUIRE(close(sum, a[i * n + j], 1e-10));
        }
    OK("n %d", n);
}
