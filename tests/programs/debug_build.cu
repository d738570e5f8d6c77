// Built with -G: unoptimised code, debug sections, everything through local memory.
// build: -G
#include "check.h"

struct Pair {
    int a;
    double b;
};

__device__ Pair combine(Pair x, Pair y) { return {x.a + y.a, x.b * y.b}; }

__global__ void fold(const int *in, Pair *out, int n)
{
    Pair sum = {0, 1.0};
    int history[8] = {};
    for (int i = 0; i < n; i++) {
        Pair next = {in[i * blockDim.x + threadIdx.x], 1.0 + i * 0.125};
        sum = combine(sum, next);
        history[i % 8] = sum.a;
    }
    for (int h : history) sum.a ^= h;
    out[threadIdx.x] = sum;
}

int main()
{
    const int threads = 50, n = 11;
    std::vector<int> in(threads * n);
    Random random(40);
    for (auto &x : in) x = random.below(1000);
    Device<int> din(in);
    Device<Pair> out(threads);
    fold<<<1, threads>>>(din, out, n);
    CUDA(cudaGetLastError());
    auto got = out.host();
    for (int t = 0; t < threads; t++) {
        int a = 0, history[8] = {};
        double b = 1;
        for (int i = 0; i < n; i++) a += in[i * threads + t], b *= 1.0 + i * 0.125, history[i % 8] = a;
        for (int h : history) a ^= h;
        REQUIRE(got[t].a == a && got[t].b == b);
    }
    OK("%d threads", threads);
}
