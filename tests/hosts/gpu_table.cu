// A module whose image is long: it holds a table of 64 KiB, which the device adds up.
#include "../programs/check.h"

#define FOUR(x) (x), (x) * 0x9e3779b9u, (x) ^ 0x85ebca77u, (x) * 0xc2b2ae3du
#define SIXTEEN(x) FOUR(x), FOUR((x) + 1), FOUR((x) + 2), FOUR((x) + 3)
#define MORE(x) SIXTEEN(x), SIXTEEN((x) + 5), SIXTEEN((x) + 11), SIXTEEN((x) + 17)
#define MANY(x) MORE(x), MORE((x) + 101u), MORE((x) + 211u), MORE((x) + 307u)
#define LOTS(x) MANY(x), MANY((x) + 1009u), MANY((x) + 2003u), MANY((x) + 3001u)
#define ALL LOTS(1u), LOTS(7001u), LOTS(14009u), LOTS(21001u), LOTS(28001u), LOTS(35023u), LOTS(42013u), \
    LOTS(49003u), LOTS(56003u), LOTS(63029u), LOTS(70001u), LOTS(77003u), LOTS(84011u), LOTS(91009u), \
    LOTS(98009u), LOTS(105019u)

__device__ unsigned table[] = {ALL};
static const unsigned expected[] = {ALL};

__global__ void sum(unsigned *out, unsigned n)
{
    unsigned mine = 0;
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        mine += table[i];
    atomicAdd(out, mine);
}

int main()
{
    const unsigned n = sizeof table / sizeof *table;
    unsigned *out, got = 0, right = 0;
    CUDA(cudaMalloc(&out, sizeof *out));
    CUDA(cudaMemset(out, 0, sizeof *out));
    sum<<<1, 256>>>(out, n);
    CUDA(cudaMemcpy(&got, out, sizeof got, cudaMemcpyDeviceToHost));
    for (unsigned i = 0; i < n; i++)
        right += expected[i];
    REQUIRE(got == right);
    return 0;
}
