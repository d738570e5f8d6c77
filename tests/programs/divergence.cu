// Divergent loops, switches, early exits, breaks and barriers among those who stay.
#include "check.h"

__host__ __device__ inline int collatz(unsigned n)
{
    int steps = 0;
    while (n != 1) {
        n = n % 2 ? 3 * n + 1 : n / 2;
        if (++steps > 500) break;
    }
    return steps;
}

__host__ __device__ inline int choose(int i)
{
    int r = 0;
    for (int k = 0; k < i % 9; k++) {
        switch ((i + k) % 6) {
        case 0: r += 1; break;
        case 1: r *= 3; // falls through
        case 2: r -= k; break;
        case 3: if (i % 4 == 1) continue; r ^= i; break;
        case 4: if (r > 1000) return r; r += i * k; break;
        default: r = -r;
        }
        r += 7;
    }
    return r;
}

__global__ void run(int *a, int *b, int *c, int n)
{
    __shared__ int alive;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (threadIdx.x == 0) alive = 0;
    __syncthreads();
    if (threadIdx.x % 5 == 4) return; // gone before the next barrier
    atomicAdd(&alive, 1);
    __syncthreads();
    if (i >= n) return;
    a[i] = collatz(i + 1), b[i] = choose(i), c[i] = alive;
}

int main()
{
    const int n = 2560;
    Device<int> a(n), b(n), c(n);
    run<<<n / 128, 128>>>(a, b, c, n);
    CUDA(cudaGetLastError());
    auto ha = a.host(), hb = b.host(), hc = c.host();
    for (int i = 0; i < n; i++)
        if (i % 128 % 5 != 4) REQUIRE(ha[i] == collatz(i + 1) && hb[i] == choose(i) && hc[i] == 128 - 25);
    OK("%d threads", n);
}
