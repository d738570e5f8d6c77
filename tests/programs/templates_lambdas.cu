// Templates, functors and device lambdas as kernel arguments, captures by value.
// build: --extended-lambda
#include "check.h"

template <typename T, typename F> __global__ void transform(const T *in, T *out, int n, F f)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = f(in[i]);
}

template <int N> struct Power {
    template <typename T> __device__ T operator()(T x) const { return x * Power<N - 1>()(x); }
};
template <> struct Power<0> {
    template <typename T> __device__ T operator()(T) const { return T(1); }
};

template <typename T, typename F> static std::vector<T> run(const std::vector<T> &in, F f)
{
    Device<T> a(in), b(in.size());
    transform<<<int(in.size() + 63) / 64, 64>>>(a.data, b.data, int(in.size()), f);
    CUDA(cudaGetLastError());
    return b.host();
}

struct Both {
    long long wide;
    short small;
};

int main()
{
    std::vector<int> ints(500);
    std::vector<double> doubles(500);
    for (int i = 0; i < 500; i++) ints[i] = i - 250, doubles[i] = i * 0.01;
    int scale = 7;
    Both both = {1ll << 33, -3};
    auto a = run(ints, Power<3>());
    auto b = run(doubles, Power<5>());
    auto c = run(ints, [=] __device__(int x) { return x * scale + both.small; });
    auto d = run(doubles, [=] __device__(double x) { return x + double(both.wide); });
    for (int i = 0; i < 500; i++) {
        REQUIRE(a[i] == ints[i] * ints[i] * ints[i] && c[i] == ints[i] * 7 - 3);
        REQUIRE(close(b[i], std::pow(doubles[i], 5), 1e-13) && d[i] == doubles[i] + double(1ll << 33));
    }
    OK("four functors");
}
