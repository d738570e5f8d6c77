// All lanes of a warp that load one place together get the same, while another block writes there.
// Code that a warp runs as one relies on it, as gcc's for OpenMP does: one lane swaps what all have
// loaded, and tells the others what was there.
#include "check.h"

// So many different values are seen, or so many are looked at, which shows nothing.
static const int SEEN = 10000, LOOKS = 100000000;

struct Shared {
    unsigned long long wide;
    unsigned narrow;
    int arrived, done, differ, seen;
};

// Both blocks are there at once: the launch is cooperative.
__global__ void race(Shared *s)
{
    volatile int *arrived = &s->arrived, *done = &s->done;
    if (threadIdx.x == 0) atomicAdd(&s->arrived, 1);
    while (*arrived < 2) {}
    if (blockIdx.x == 0) {
        for (unsigned i = 1; threadIdx.x == 0 && !*done; i++) {
            asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(&s->narrow), "r"(i) : "memory");
            asm volatile("st.relaxed.gpu.u64 [%0], %1;"
                         ::"l"(&s->wide), "l"(1ull * i) : "memory");
        }
        return;
    }
    int differ = 0, seen = 0;
    unsigned before = 0;
    for (int look = 0; look < LOOKS && seen < SEEN; look++) {
        unsigned a;
        unsigned long long b;
        // Plain loads may be of a GPU's first cache, which holds nothing older than a fence.
        __threadfence();
        __syncwarp();
        asm volatile("ld.u32 %0, [%1];" : "=r"(a) : "l"(&s->narrow) : "memory");
        asm volatile("ld.u64 %0, [%1];" : "=l"(b) : "l"(&s->wide) : "memory");
        unsigned first = __shfl_sync(~0u, a, 0);
        unsigned long long first_wide = __shfl_sync(~0u, b, 0);
        differ += __any_sync(~0u, a != first || b != first_wide);
        seen += first != before;
        before = first;
    }
    if (threadIdx.x == 0) {
        s->differ = differ;
        s->seen = seen;
        *done = 1;
    }
}

int main()
{
    Device<Shared> shared(1);
    CUDA(cudaMemset(shared.data, 0, sizeof(Shared)));
    void *args[] = {&shared.data};
    CUDA(cudaLaunchCooperativeKernel((const void *)race, 2, 32, args));
    CUDA(cudaDeviceSynchronize());
    Shared found = shared.host()[0];
    REQUIRE(found.differ == 0);
    REQUIRE(found.seen == SEEN);
    OK("%d different values, the same for all lanes", SEEN);
}
