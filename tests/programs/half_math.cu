// fp16 and bf16 arithmetic, packed and single, conversions, comparisons, atomics.
// build: -arch=sm_80
#include "check.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__global__ void halves(const float *a, const float *b, float *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    __half x = __float2half(a[i]), y = __float2half(b[i]);
    float *o = out + 8 * i;
    o[0] = __half2float(__hadd(x, y));
    o[1] = __half2float(__hmul(x, y));
    o[2] = __half2float(__hfma(x, y, x));
    __half2 p = __floats2half2_rn(a[i], b[i]), q = __hmul2(__hadd2(p, p), __lowhigh2highlow(p));
    o[3] = __low2float(q) + __high2float(q);
    o[4] = __hgt(x, y) ? 1 : __heq(x, y) ? 0 : -1;
    __nv_bfloat16 u = __float2bfloat16(a[i]), v = __float2bfloat16(b[i]);
    o[5] = __bfloat162float(__hadd(u, v));
    o[6] = __bfloat162float(__hfma(u, v, v));
    o[7] = float(hsqrt(__habs(x))) + float(__half2int_rn(y));
}

__global__ void sum(__half2 *out) { atomicAdd(out, __floats2half2_rn(1.0f, 0.5f)); }

// Round to nearest even at a given number of fraction bits, normal range.
static double round_to(double x, int bits)
{
    if (x == 0) return 0;
    int e;
    std::frexp(x, &e);
    double ulp = std::ldexp(1.0, e - bits - 1);
    return std::nearbyint(x / ulp) * ulp;
}

int main()
{
    const int n = 4000;
    Random random(33);
    std::vector<float> a(n), b(n);
    for (auto &x : a) x = 8 * random.uniform() - 4;
    for (auto &x : b) x = 8 * random.uniform() - 4;
    Device<float> da(a), db(b), out(8 * n);
    halves<<<(n + 127) / 128, 128>>>(da, db, out, n);
    auto o = out.host();
    auto h = [](double x) { return round_to(x, 10); };
    auto f = [](double x) { return round_to(x, 7); };
    for (int i = 0; i < n; i++) {
        if (std::fabs(a[i]) < 0.01 || std::fabs(b[i]) < 0.01) continue; // near subnormal products
        double x = h(a[i]), y = h(b[i]), u = f(a[i]), v = f(b[i]);
        const float *r = &o[8 * i];
        if (std::fabs(x + y) > 0.01) REQUIRE(r[0] == float(h(x + y)));
        REQUIRE(r[1] == float(h(x * y)));
        if (std::fabs(x * y + x) > 0.01) REQUIRE(r[2] == float(h(x * y + x)));
        REQUIRE(r[3] == float(h(2 * x * y)) * 2);
        REQUIRE(r[4] == (x > y ? 1 : x == y ? 0 : -1));
        if (std::fabs(u + v) > 0.01) REQUIRE(r[5] == float(f(u + v)));
        if (std::fabs(u * v + v) > 0.01) REQUIRE(r[6] == float(f(u * v + v)));
        REQUIRE(std::fabs(r[7] - (std::sqrt(std::fabs(x)) + std::nearbyint(y))) < 0.002);
    }
    Device<__half2> total(1);
    CUDA(cudaMemset(total, 0, 4));
    sum<<<4, 64>>>(total);
    __half2 t = total.host()[0];
    REQUIRE(__low2float(t) == 256.0f && __high2float(t) == 128.0f);
    OK("%d pairs", n);
}
