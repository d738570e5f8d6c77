// European options in single precision against the host's double erfc.
#include "check.h"

__device__ float cdf(float x) { return 0.5f * erfcf(-x * 0.70710678f); }

__global__ void price(const float *spot, const float *strike, const float *years, float2 *out, int n)
{
    const float r = 0.02f, v = 0.30f;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float s = spot[i], k = strike[i], t = years[i], root = v * sqrtf(t);
        float d1 = (logf(s / k) + (r + 0.5f * v * v) * t) / root, d2 = d1 - root;
        float discounted = k * expf(-r * t);
        out[i] = {s * cdf(d1) - discounted * cdf(d2), discounted * cdf(-d2) - s * cdf(-d1)};
    }
}

int main()
{
    const int n = 50000;
    Random random(15);
    std::vector<float> spot(n), strike(n), years(n);
    for (int i = 0; i < n; i++) {
        spot[i] = 5 + 25 * random.uniform();
        strike[i] = 1 + 99 * random.uniform();
        years[i] = 0.25f + 9.75f * random.uniform();
    }
    Device<float> ds(spot), dk(strike), dt(years);
    Device<float2> out(n);
    price<<<60, 128>>>(ds, dk, dt, out, n);
    auto got = out.host();
    auto cdf64 = [](double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); };
    for (int i = 0; i < n; i++) {
        double s = spot[i], k = strike[i], t = years[i], root = 0.30 * std::sqrt(t);
        double d1 = (std::log(s / k) + (0.02 + 0.045) * t) / root, d2 = d1 - root, d = k * std::exp(-0.02 * t);
        REQUIRE(std::fabs(got[i].x - (s * cdf64(d1) - d * cdf64(d2))) < 1e-4);
        REQUIRE(std::fabs(got[i].y - (d * cdf64(-d2) - s * cdf64(-d1))) < 1e-4);
    }
    OK("%d options", n);
}
