// C = A B through shared-memory tiles, checked by random projections: C x = A (B x).
#include "check.h"

template <int Tile> __global__ void matmul(const float *a, const float *b, float *c, int n)
{
    __shared__ float ta[Tile][Tile], tb[Tile][Tile + 1];
    int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * Tile + y, col = blockIdx.x * Tile + x;
    float sum = 0;
    for (int base = 0; base < n; base += Tile) {
        ta[y][x] = a[row * n + base + x];
        tb[y][x] = b[(base + y) * n + col];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < Tile; i++) sum += ta[y][i] * tb[i][x];
        __syncthreads();
    }
    c[row * n + col] = sum;
}

static std::vector<double> product(const std::vector<float> &m, const std::vector<double> &x)
{
    size_t n = x.size();
    std::vector<double> y(n, 0.0);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++) y[i] += m[i * n + j] * x[j];
    return y;
}

int main()
{
    const int n = 256;
    Random random(3);
    std::vector<float> a(n * n), b(n * n);
    for (auto &x : a) x = random.uniform() - 0.5f;
    for (auto &x : b) x = random.uniform() - 0.5f;
    Device<float> da(a), db(b), dc(n * n);
    for (int tile : {16, 32}) {
        CUDA(cudaMemset(dc, 0xff, n * n * sizeof(float)));
        dim3 grid(n / tile, n / tile), block(tile, tile);
        if (tile == 16) matmul<16><<<grid, block>>>(da, db, dc, n);
        else matmul<32><<<grid, block>>>(da, db, dc, n);
        auto c = dc.host();
        std::vector<double> x(n);
        for (auto &v : x) v = random.uniform() - 0.5;
        auto got = product(c, x), want = product(a, product(b, x));
        for (int i = 0; i < n; i++) REQUIRE(close(got[i], want[i], 1e-4));
    }
    OK("n %d, tiles 16 and 32", n);
}
