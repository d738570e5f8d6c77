// Adds two vectors; the smallest whole program.
#include "check.h"

__global__ void add(const float *a, const float *b, float *sum, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

int main()
{
    const int n = 100003;
    Random random(1);
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) a[i] = random.uniform(), b[i] = random.uniform();
    Device<float> da(a), db(b), dsum(n);
    add<<<(n + 255) / 256, 256>>>(da, db, dsum, n);
    CUDA(cudaGetLastError());
    auto sum = dsum.host();
    for (int i = 0; i < n; i++) REQUIRE(sum[i] == a[i] + b[i]);
    OK("%d sums", n);
}
