// Gaussian elimination with partial pivoting chosen on the device; the residual vanishes.
#include "check.h"

__global__ void pivot(float *a, int n, int k)
{
    __shared__ float best[128];
    __shared__ int where[128];
    int t = threadIdx.x, w = n + 1;
    best[t] = -1, where[t] = k;
    for (int i = k + t; i < n; i += 128)
        if (fabsf(a[i * w + k]) > best[t]) best[t] = fabsf(a[i * w + k]), where[t] = i;
    for (int half = 64; half; half /= 2) {
        __syncthreads();
        if (t < half && best[t + half] > best[t]) best[t] = best[t + half], where[t] = where[t + half];
    }
    __syncthreads();
    int p = where[0];
    if (p == k) return;
    for (int j = t; j < w; j += 128) {
        float x = a[k * w + j];
        a[k * w + j] = a[p * w + j], a[p * w + j] = x;
    }
}

__global__ void eliminate(float *a, int n, int k)
{
    int i = blockIdx.x, w = n + 1;
    if (i == k) return;
    float f = a[i * w + k] / a[k * w + k];
    __syncthreads();
    for (int j = k + threadIdx.x; j < w; j += blockDim.x) a[i * w + j] -= f * a[k * w + j];
}

int main()
{
    const int n = 80, w = n + 1;
    Random random(18);
    std::vector<float> a(n * w);
    for (auto &x : a) x = random.uniform() - 0.5f;
    Device<float> d(a);
    for (int k = 0; k < n; k++) {
        pivot<<<1, 128>>>(d, n, k);
        eliminate<<<n, 64>>>(d, n, k);
    }
    auto r = d.host();
    for (int i = 0; i < n; i++) {
        double residual = -a[i * w + n];
        for (int j = 0; j < n; j++) residual += double(a[i * w + j]) * r[j * w + n] / r[j * w + j];
        REQUIRE(std::fabs(residual) < 2e-3);
    }
    OK("n %d", n);
}
