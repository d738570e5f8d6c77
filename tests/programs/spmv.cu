// Sparse matrix times vector in CSR: a thread a row, and a warp a row.
#include "check.h"

__global__ void scalar(const int *row, const int *col, const double *v, const double *x, double *y, int n)
{
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    double sum = 0;
    for (int i = row[r]; i < row[r + 1]; i++) sum += v[i] * x[col[i]];
    y[r] = sum;
}

__global__ void vector(const int *row, const int *col, const double *v, const double *x, double *y, int n)
{
    int r = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    if (r >= n) return;
    double sum = 0;
    for (int i = row[r] + lane; i < row[r + 1]; i += 32) sum += v[i] * x[col[i]];
    for (int d = 16; d; d /= 2) sum += __shfl_down_sync(~0u, sum, d);
    if (lane == 0) y[r] = sum;
}

int main()
{
    const int n = 3001;
    Random random(13);
    std::vector<int> row{0}, col;
    std::vector<double> v, x(n);
    for (int r = 0; r < n; r++) {
        int count = r % 97 == 0 ? 200 : int(random.below(20));
        for (int i = 0; i < count; i++) col.push_back(random.below(n)), v.push_back(random.uniform());
        row.push_back(int(col.size()));
    }
    for (auto &e : x) e = random.uniform();
    Device<int> drow(row), dcol(col);
    Device<double> dv(v), dx(x), y1(n), y2(n);
    scalar<<<(n + 127) / 128, 128>>>(drow, dcol, dv, dx, y1, n);
    vector<<<(n * 32 + 127) / 128, 128>>>(drow, dcol, dv, dx, y2, n);
    auto g1 = y1.host(), g2 = y2.host();
    for (int r = 0; r < n; r++) {
        double want = 0;
        for (int i = row[r]; i < row[r + 1]; i++) want += v[i] * x[col[i]];
        REQUIRE(close(g1[r], want, 1e-12) && close(g2[r], want, 1e-12));
    }
    OK("%d rows, %zu entries", n, v.size());
}
