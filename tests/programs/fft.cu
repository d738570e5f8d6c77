// Radix-2 FFT in shared memory: against the definition, and back again.
#include "check.h"

__global__ void fft(const float2 *in, float2 *out, int log, float sign)
{
    extern __shared__ float2 s[];
    int n = 1 << log, t = threadIdx.x;
    for (int i = t; i < n; i += blockDim.x) s[__brev(i) >> (32 - log)] = in[blockIdx.x * n + i];
    for (int half = 1; half < n; half *= 2) {
        __syncthreads();
        for (int i = t; i < n / 2; i += blockDim.x) {
            int k = i & (half - 1), a = 2 * i - k, b = a + half;
            float sn, cs;
            sincospif(sign * k / half, &sn, &cs);
            float2 u = s[a], w = s[b], v = {w.x * cs - w.y * sn, w.x * sn + w.y * cs};
            s[a] = {u.x + v.x, u.y + v.y}, s[b] = {u.x - v.x, u.y - v.y};
        }
    }
    __syncthreads();
    for (int i = t; i < n; i += blockDim.x) out[blockIdx.x * n + i] = s[i];
}

int main()
{
    const int log = 10, n = 1 << log, batch = 5;
    Random random(14);
    std::vector<float2> in(n * batch);
    for (auto &z : in) z = {random.uniform() - 0.5f, random.uniform() - 0.5f};
    Device<float2> a(in), b(n * batch), c(n * batch);
    fft<<<batch, 256, n * sizeof(float2)>>>(a, b, log, -1.0f);
    fft<<<batch, 256, n * sizeof(float2)>>>(b, c, log, 1.0f);
    auto spectrum = b.host(), back = c.host();
    for (int i = 0; i < n * batch; i++)
        REQUIRE(close(back[i].x / n, in[i].x, 1e-5) && close(back[i].y / n, in[i].y, 1e-5));
    for (int k = 0; k < n; k += 61) {
        double re = 0, im = 0;
        for (int i = 0; i < n; i++) {
            double angle = -2 * M_PI * k * i / n;
            re += in[i].x * std::cos(angle) - in[i].y * std::sin(angle);
            im += in[i].x * std::sin(angle) + in[i].y * std::cos(angle);
        }
        REQUIRE(std::fabs(spectrum[k].x - re) < 1e-3 && std::fabs(spectrum[k].y - im) < 1e-3);
    }
    OK("%d transforms of %d", batch, n);
}
