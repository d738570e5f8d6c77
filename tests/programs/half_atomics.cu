// Vector atomics of sm_90: f16 minimum and maximum, bf16 and float4 additions.
// build: -gencode arch=compute_90,code=compute_90
#include "check.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__global__ void extremes(const __half2 *in, __half2 *least, __half2 *greatest)
{
    unsigned v = *(const unsigned *)&in[blockIdx.x * blockDim.x + threadIdx.x], w = v ^ 0x80008000u;
    asm volatile("red.global.v2.f16x2.min.noftz [%0], {%1, %2};" ::"l"(least), "r"(v), "r"(w) : "memory");
    unsigned old, other;
    asm volatile("atom.global.v2.f16x2.max.noftz {%0, %1}, [%2], {%3, %4};"
                 : "=r"(old), "=r"(other) : "l"(greatest), "r"(v), "r"(w) : "memory");
    (void)old, (void)other;
}

__global__ void add4(float4 *sum) { atomicAdd(sum, make_float4(1, 2, 3, float(threadIdx.x))); }

// Whole numbers up to 256 are exact in bf16.
__global__ void add_bf16(__nv_bfloat162 *pair, __nv_bfloat16 *one)
{
    atomicAdd(&pair[threadIdx.x % 4], __floats2bfloat162_rn(1, 2));
    atomicAdd(one, __float2bfloat16(1));
}

int main()
{
    Random random(77);
    std::vector<__half2> in(1024);
    float low[2] = {1e4, 1e4}, high[2] = {-1e4, -1e4};
    for (auto &x : in) {
        float a = int(random.below(2000)) - 1000, b = int(random.below(2000)) - 1000;
        x = __floats2half2_rn(a, b);
        low[0] = fminf(low[0], a), high[0] = fmaxf(high[0], a);
        low[1] = fminf(low[1], b), high[1] = fmaxf(high[1], b);
    }
    __half2 big = __floats2half2_rn(1e4, 1e4), small = __floats2half2_rn(-1e4, -1e4);
    Device<__half2> din(in), least(std::vector<__half2>(2, big)), greatest(std::vector<__half2>(2, small));
    extremes<<<8, 128>>>(din, least, greatest);
    auto l = least.host(), g = greatest.host();
    REQUIRE(__low2float(l[0]) == low[0] && __high2float(l[0]) == low[1]);
    REQUIRE(__low2float(l[1]) == -high[0] && __high2float(l[1]) == -high[1]);
    REQUIRE(__low2float(g[0]) == high[0] && __high2float(g[0]) == high[1]);
    REQUIRE(__low2float(g[1]) == -low[0] && __high2float(g[1]) == -low[1]);
    Device<float4> sum(std::vector<float4>(1, make_float4(0, 0, 0, 0)));
    add4<<<4, 64>>>(sum);
    float4 s = sum.host()[0];
    REQUIRE(s.x == 256 && s.y == 512 && s.z == 768 && s.w == 4 * 63 * 32);
    Device<__nv_bfloat162> pair(std::vector<__nv_bfloat162>(4, __floats2bfloat162_rn(0, -100)));
    Device<__nv_bfloat16> one(std::vector<__nv_bfloat16>(1, __float2bfloat16(-56)));
    add_bf16<<<4, 64>>>(pair, one);
    for (auto p : pair.host()) REQUIRE(__low2float(p) == 64 && __high2float(p) == 28);
    REQUIRE(__bfloat162float(one.host()[0]) == 200);
    OK("f16x2, bf16, float4");
}
