// Addresses of functions in variables of a linked program: a table that stays, a word that changes,
// and one in memory.
// build: -rdc=true
#include "check.h"

typedef int (*Step)(int);
__device__ __noinline__ int add(int x) { return x + 7; }
__device__ __noinline__ int twice(int x) { return 2 * x; }
__device__ __noinline__ int turn(int x) { return (x >> 3) ^ (x * 5); }
__device__ Step const steps[] = { add, twice, turn };
__device__ Step next = add;

__global__ void run(int *out, int round)
{
    int i = threadIdx.x;
    out[i] = next(steps[(i + round) % 3](out[i])) & 0xffff;
}

__global__ void choose(int which) { next = steps[which]; }

static int expected(int which, int x)
{
    return which == 0 ? x + 7 : which == 1 ? 2 * x : (x >> 3) ^ (x * 5);
}

int main()
{
    const int n = 96, rounds = 40;
    std::vector<int> want(n);
    for (int i = 0; i < n; i++) want[i] = i;
    Device<int> out(want);
    for (int round = 0; round < rounds; round++) {
        // Now and then another; at most times what the module began with.
        int which = round % 8 == 7 ? 1 : 0;
        choose<<<1, 1>>>(which);
        run<<<1, n>>>(out, round);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < n; i++) want[i] = expected(which, expected((i + round) % 3, want[i])) & 0xffff;
        auto got = out.host();
        for (int i = 0; i < n; i++) REQUIRE(got[i] == want[i]);
    }
    OK("%d rounds", rounds);
}
