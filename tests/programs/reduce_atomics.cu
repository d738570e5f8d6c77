// Every atomic on 32 and 64 bits, in global and in shared memory, from many blocks.
#include "check.h"

struct Cell {
    int add, min, max, exch, andv, orv, xorv, cas;
    unsigned inc, dec, uadd, umin;
    unsigned long long add64, max64, cas64;
    long long smin64;
    float fadd;
    double dadd;
};

__device__ void cas_add(int *at, int value)
{
    int seen = *at, old;
    do old = seen, seen = atomicCAS(at, old, old + value);
    while (seen != old);
}

__device__ void all(Cell *c, int i)
{
    atomicAdd(&c->add, i);
    atomicMin(&c->min, -i);
    atomicMax(&c->max, i);
    atomicExch(&c->exch, 7);
    atomicAnd(&c->andv, ~(1 << i % 20));
    atomicOr(&c->orv, 1 << i % 20);
    atomicXor(&c->xorv, i);
    cas_add(&c->cas, 3);
    atomicInc(&c->inc, 9);
    atomicDec(&c->dec, 9);
    atomicSub(&c->uadd, 2u);
    atomicMin(&c->umin, unsigned(5000 - i));
    atomicAdd(&c->add64, 1ull << 33);
    atomicMax(&c->max64, (unsigned long long)i << 40);
    atomicCAS(&c->cas64, 0ull, 42ull);
    atomicMin(&c->smin64, -(long long)i << 35);
    atomicAdd(&c->fadd, 0.5f);
#if __CUDA_ARCH__ >= 600
    atomicAdd(&c->dadd, 0.25);
#endif
}

__global__ void global(Cell *c) { all(c, blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void shared(Cell *out)
{
    __shared__ Cell c;
    if (threadIdx.x == 0) c = *out;
    __syncthreads();
    for (int i = threadIdx.x; i < 4096; i += blockDim.x) all(&c, i);
    __syncthreads();
    if (threadIdx.x == 0) *out = c;
}

static void check(const Cell &c)
{
    const int n = 4096;
    int x = 0;
    for (int i = 0; i < n; i++) x ^= i;
    REQUIRE(c.add == n * (n - 1) / 2 && c.min == 1 - n && c.max == n - 1 && c.exch == 7);
    REQUIRE(c.andv == ~0xfffff && c.orv == 0xfffff && c.xorv == x && c.cas == 3 * n);
    REQUIRE(c.inc == n % 10 && c.dec == (10 - n % 10) % 10 && c.uadd == 0u - 2u * n);
    REQUIRE(c.umin == 5000u - (n - 1) && c.add64 == (unsigned long long)n << 33);
    REQUIRE(c.max64 == (unsigned long long)(n - 1) << 40 && c.cas64 == 42);
    REQUIRE(c.smin64 == -((long long)(n - 1) << 35) && c.fadd == 0.5f * n && c.dadd == 0.25 * n);
}

int main()
{
    Cell zero = {};
    zero.andv = -1;
    zero.umin = 1u << 30;
    Device<Cell> a(std::vector<Cell>{zero}), b(std::vector<Cell>{zero});
    global<<<32, 128>>>(a);
    shared<<<1, 256>>>(b);
    CUDA(cudaGetLastError());
    check(a.host()[0]);
    check(b.host()[0]);
    OK("18 atomics, twice");
}
