// Single and double precision: roundings, special values, the math library within its bounds.
#include "check.h"

__global__ void exact(const float *a, const float *b, float *o, double *d, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float x = a[i], y = b[i];
    o += 16 * i, d += 8 * i;
    o[0] = __fadd_rz(x, y), o[1] = __fadd_ru(x, y), o[2] = __fmul_rd(x, y), o[3] = __fmaf_rn(x, y, -x * y);
    o[4] = __fdiv_rn(x, y), o[5] = __fsqrt_rn(fabsf(x)), o[6] = __frcp_rn(y), o[7] = rintf(x), o[8] = truncf(x);
    o[9] = floorf(y), o[10] = ceilf(y), o[11] = float(int(x)), o[12] = fminf(x, nanf("")), o[13] = fmaxf(x, y);
    o[14] = copysignf(x, y), o[15] = fmodf(x, y);
    d[0] = __dadd_rz(x, y * 1e-20), d[1] = __fma_rn(double(x), double(y), 1.0 / 3), d[2] = double(x) / y;
    d[3] = sqrt(fabs(double(x))), d[4] = double((long long)(x * 1e6)), d[5] = double(float(double(x) * 1.0000001));
    d[6] = (double)(unsigned)(fabsf(x)), d[7] = __double2float_rz(x * 1.00000001);
}

__global__ void library(const double *in, double *o, float *f, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double x = in[i];
    float y = float(x);
    o += 8 * i, f += 8 * i;
    o[0] = sin(x), o[1] = exp(x * 0.1), o[2] = log(fabs(x) + 0.1), o[3] = pow(fabs(x), 1.7), o[4] = atan2(x, 2.0);
    o[5] = erf(x), o[6] = tgamma(fabs(x) * 0.1 + 1), o[7] = cbrt(x);
    f[0] = sinf(y), f[1] = expf(y * 0.1f), f[2] = logf(fabsf(y) + 0.1f), f[3] = powf(fabsf(y), 1.7f), f[4] = tanhf(y);
    f[5] = __sinf(y * 0.05f), f[6] = rsqrtf(fabsf(y) + 1), f[7] = exp2f(y * 0.3f);
}

int main()
{
    const int n = 4000;
    Random random(43);
    std::vector<float> a(n), b(n);
    for (int i = 0; i < n; i++) a[i] = std::ldexp(random.uniform() - 0.5f, int(random.below(20)));
    for (int i = 0; i < n; i++) b[i] = std::ldexp(random.uniform() - 0.5f, int(random.below(20)));
    Device<float> da(a), db(b), out(16 * n), f(8 * n);
    Device<double> dout(8 * n), o(8 * n);
    exact<<<(n + 127) / 128, 128>>>(da, db, out, dout, n);
    auto e = out.host();
    auto d = dout.host();
    for (int i = 0; i < n; i++) {
        float x = a[i], y = b[i];
        const float *r = &e[16 * i];
        const double *s = &d[8 * i];
        // The sum and the product of two floats of these sizes are exact, or rounded once, in
        // double.
        double sum = double(x) + y, product = double(x) * y;
        auto down = [](double v) { float t = float(v); return t > v ? std::nextafterf(t, -INFINITY) : t; };
        auto up = [](double v) { float t = float(v); return t < v ? std::nextafterf(t, INFINITY) : t; };
        REQUIRE(r[0] == (sum < 0 ? up(sum) : down(sum)) && r[1] == up(sum) && r[2] == down(product));
        REQUIRE(r[3] == std::fmaf(x, y, -x * y) && r[4] == x / y && r[5] == std::sqrt(std::fabs(x)) && r[6] == 1.0f / y);
        REQUIRE(r[7] == std::rint(x) && r[8] == std::trunc(x) && r[9] == std::floor(y) && r[10] == std::ceil(y));
        REQUIRE(r[11] == float(int(x)) && r[12] == x && r[13] == std::max(x, y) && r[14] == std::copysign(x, y));
        REQUIRE(r[15] == std::fmod(x, y));
        REQUIRE(s[1] == std::fma(double(x), double(y), 1.0 / 3) && s[2] == double(x) / y && s[3] == std::sqrt(std::fabs(double(x))));
        REQUIRE(s[4] == double((long long)(x * 1e6)) && s[5] == double(float(double(x) * 1.0000001)));
        REQUIRE(s[6] == double(unsigned(std::fabs(x))));
        double t = double(x) * 1.00000001;
        REQUIRE(s[7] == double(t < 0 ? up(t) : down(t)));
    }
    std::vector<double> in(n);
    for (auto &x : in) x = 40.0 * (random.uniform() - 0.5);
    Device<double> din(in);
    library<<<(n + 127) / 128, 128>>>(din, o, f, n);
    auto lo = o.host();
    auto lf = f.host();
    for (int i = 0; i < n; i++) {
        double x = in[i], y = float(x);
        const double *r = &lo[8 * i];
        const float *s = &lf[8 * i];
        REQUIRE(close(r[0], std::sin(x), 1e-14) && close(r[1], std::exp(x * 0.1), 1e-14));
        REQUIRE(close(r[2], std::log(std::fabs(x) + 0.1), 1e-14) && close(r[3], std::pow(std::fabs(x), 1.7), 1e-14));
        REQUIRE(close(r[4], std::atan2(x, 2.0), 1e-14) && close(r[5], std::erf(x), 1e-14));
        REQUIRE(close(r[6], std::tgamma(std::fabs(x) * 0.1 + 1), 1e-13) && close(r[7], std::cbrt(x), 1e-14));
        REQUIRE(close(s[0], std::sin(y), 1e-6) && close(s[1], std::exp(y * 0.1), 1e-6));
        REQUIRE(close(s[2], std::log(std::fabs(y) + 0.1), 1e-6) && close(s[3], std::pow(std::fabs(y), 1.7), 2e-6));
        REQUIRE(close(s[4], std::tanh(y), 1e-6) && close(s[5], std::sin(y * 0.05), 1e-5));
        REQUIRE(close(s[6], 1 / std::sqrt(std::fabs(y) + 1), 1e-6) && close(s[7], std::exp2(y * 0.3), 1e-6));
    }
    OK("%d arguments", n);
}
