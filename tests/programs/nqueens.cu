// Counts solutions of n queens by recursion in each thread: deep stacks, divergent lanes.
#include "check.h"

__device__ __noinline__ int place(unsigned all, unsigned columns, unsigned left, unsigned right)
{
    if (columns == all) return 1;
    int found = 0;
    for (unsigned free = all & ~(columns | left | right); free; free &= free - 1) {
        unsigned bit = free & -free;
        found += place(all, columns | bit, (left | bit) << 1, (right | bit) >> 1);
    }
    return found;
}

__global__ void solve(int n, int *found)
{
    int a = blockIdx.x, b = threadIdx.x;
    if (a == b || a == b + 1 || a + 1 == b) return;
    unsigned first = 1u << a, second = 1u << b;
    atomicAdd(found, place((1u << n) - 1, first | second, (first << 1 | second) << 1, (first >> 1 | second) >> 1));
}

int main()
{
    const int known[] = {0, 0, 0, 0, 2, 10, 4, 40, 92, 352, 724};
    Device<int> found(1);
    for (int n = 4; n <= 10; n++) {
        CUDA(cudaMemset(found, 0, sizeof(int)));
        solve<<<n, n>>>(n, found);
        CUDA(cudaGetLastError());
        REQUIRE(found.host()[0] == known[n]);
    }
    OK("4 to 10 queens");
}
