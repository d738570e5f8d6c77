// C = A B, one thread an element, against the host's double sum.
#include "check.h"

__global__ void matmul(const float *a, const float *b, float *c, int m, int n, int k)
{
    int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= m || col >= n) return;
    float sum = 0;
    for (int i = 0; i < k; i++) sum += a[row * k + i] * b[i * n + col];
    c[row * n + col] = sum;
}

int main()
{
    const int m = 67, n = 93, k = 129;
    Random random(2);
    std::vector<float> a(m * k), b(k * n);
    for (auto &x : a) x = random.uniform() - 0.5f;
    for (auto &x : b) x = random.uniform() - 0.5f;
    Device<float> da(a), db(b), dc(m * n);
    matmul<<<dim3((n + 15) / 16, (m + 15) / 16), dim3(16, 16)>>>(da, db, dc, m, n, k);
    auto c = dc.host();
    for (int row = 0; row < m; row++)
        for (int col = 0; col < n; col++) {
            double want = 0;
            for (int i = 0; i < k; i++) want += double(a[row * k + i]) * b[i * n + col];
            REQUIRE(close(c[row * n + col], want, 1e-5));
        }
    OK("%dx%dx%d", m, n, k);
}
