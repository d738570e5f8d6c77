// Relocatable device code: functions, variables and kernels across two files.
// build: -rdc=true {dir}/_rdc_other.cu
#include "check.h"

extern __device__ int counter;
extern __constant__ float factors[4];
extern __device__ int twice(int x);
__device__ int own(int x) { return x + 1; }
static __device__ __noinline__ int seven() { return 1; }
__global__ void other(int *p);

static __global__ void local(int *p, float *f)
{
    int i = threadIdx.x;
    p[i] = twice(i) + own(counter) * seven();
    f[i] = factors[i % 4];
}

int main()
{
    Device<int> p(32), q(32);
    Device<float> f(32);
    local<<<1, 32>>>(p, f);
    other<<<1, 32>>>(q);
    auto a = p.host(), b = q.host();
    auto c = f.host();
    for (int i = 0; i < 32; i++) {
        REQUIRE(a[i] == 2 * i + 101 && b[i] == i + 1 + 7);
        REQUIRE(c[i] == 0.5f * (i % 4));
    }
    OK("two files");
}
