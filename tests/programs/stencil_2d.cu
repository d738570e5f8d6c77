// Jacobi iterations of the heat equation on a plane, ping-pong, bit for bit against the host.
#include "check.h"

__host__ __device__ inline float point(const float *u, int w, int i)
{
    float sides = (u[i - 1] + u[i + 1]) + (u[i - w] + u[i + w]);
#ifdef __CUDA_ARCH__
    return __fadd_rn(u[i], __fmul_rn(0.2f, __fsub_rn(sides, __fmul_rn(4.0f, u[i]))));
#else
    volatile float four = 4.0f * u[i], change = 0.2f * (sides - four);
    return u[i] + change;
#endif
}

__global__ void step(const float *in, float *out, int w, int h)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    int i = y * w + x;
    out[i] = x == 0 || y == 0 || x == w - 1 || y == h - 1 ? in[i] : point(in, w, i);
}

int main()
{
    const int w = 150, h = 117, steps = 50;
    Random random(8);
    std::vector<float> u(w * h), next(w * h);
    for (auto &x : u) x = random.uniform();
    Device<float> a(u), b(w * h);
    for (int s = 0; s < steps; s++)
        step<<<dim3((w + 31) / 32, (h + 7) / 8), dim3(32, 8)>>>(s % 2 ? b : a, s % 2 ? a : b, w, h);
    auto got = a.host();
    for (int s = 0; s < steps; s++, u.swap(next))
        for (int y = 0; y < h; y++)
            for (int x = 0; x < w; x++) {
                int i = y * w + x;
                next[i] = x == 0 || y == 0 || x == w - 1 || y == h - 1 ? u[i] : point(u.data(), w, i);
            }
    for (int i = 0; i < w * h; i++) REQUIRE(got[i] == u[i]);
    OK("%dx%d, %d steps", w, h, steps);
}
