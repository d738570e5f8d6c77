// Lennard-Jones atoms with cell lists built by atomics; energy and forces against all pairs.
#include "check.h"

const int Cells = 6, Room = 64;
const float Box = 12.0f, Cut = 2.0f;

__device__ int cell_of(float x) { return min(int(x * (Cells / Box)), Cells - 1); }

__global__ void bin(const float4 *p, int *count, int *member, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int c = (cell_of(p[i].z) * Cells + cell_of(p[i].y)) * Cells + cell_of(p[i].x);
    int slot = atomicAdd(&count[c], 1);
    if (slot < Room) member[c * Room + slot] = i;
}

__device__ float image(float d) { return d - Box * rintf(d * (1.0f / Box)); }

__global__ void force(const float4 *p, const int *count, const int *member, float4 *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 me = p[i], f = {0, 0, 0, 0};
    int cx = cell_of(me.x), cy = cell_of(me.y), cz = cell_of(me.z);
    for (int k = 0; k < 27; k++) {
        int x = (cx + k % 3 + Cells - 1) % Cells, y = (cy + k / 3 % 3 + Cells - 1) % Cells;
        int z = (cz + k / 9 + Cells - 1) % Cells, c = (z * Cells + y) * Cells + x;
        for (int s = 0; s < count[c]; s++) {
            int j = member[c * Room + s];
            if (j == i) continue;
            float dx = image(me.x - p[j].x), dy = image(me.y - p[j].y), dz = image(me.z - p[j].z);
            float r2 = dx * dx + dy * dy + dz * dz;
            if (r2 >= Cut * Cut) continue;
            float i2 = 1.0f / fmaxf(r2, 0.25f), i6 = i2 * i2 * i2, g = 24 * i6 * (2 * i6 - 1) * i2;
            f.x += g * dx, f.y += g * dy, f.z += g * dz, f.w += 4 * i6 * (i6 - 1);
        }
    }
    out[i] = f;
}

int main()
{
    const int n = 1500, cells = Cells * Cells * Cells;
    Random random(21);
    std::vector<float4> p(n);
    for (auto &q : p) q = {random.uniform() * Box, random.uniform() * Box, random.uniform() * Box, 0};
    Device<float4> dp(p), df(n);
    Device<int> count(cells), member(cells * Room);
    CUDA(cudaMemset(count, 0, cells * sizeof(int)));
    bin<<<(n + 127) / 128, 128>>>(dp, count, member, n);
    force<<<(n + 127) / 128, 128>>>(dp, count, member, df, n);
    for (int c : count.host()) REQUIRE(c <= Room);
    auto f = df.host();
    for (int i = 0; i < n; i += 17) {
        double fx = 0, energy = 0, scale = 0;
        for (int j = 0; j < n; j++) {
            auto image64 = [](double d) { return d - Box * std::rint(d / Box); };
            double dx = image64(p[i].x - p[j].x), dy = image64(p[i].y - p[j].y), dz = image64(p[i].z - p[j].z);
            double r2 = dx * dx + dy * dy + dz * dz;
            if (j == i || r2 >= Cut * Cut) continue;
            double i2 = 1.0 / std::max(r2, 0.25), i6 = i2 * i2 * i2, g = 24 * i6 * (2 * i6 - 1) * i2;
            fx += g * dx, energy += 4 * i6 * (i6 - 1), scale += std::fabs(g * dx) + 1;
        }
        REQUIRE(std::fabs(f[i].x - fx) < 1e-3 * scale && close(f[i].w, energy, 1e-3));
    }
    OK("%d atoms, %d cells", n, cells);
}
