// Vectors that one block stores and another loads meanwhile are seen whole, as CUB's scans rely on:
// a value beside the flag that says that it is there. So are those past a cache (cg, cv, wt), which
// older scans use.
#include "check.h"

// So often are so many different vectors seen, or so many looked at, which shows nothing. A program
// of two launches alone would be over before its devices have moved.
static const int ROUNDS = 20, SEEN = 1500, LOOKS = 100000000;

struct Shared {
    ulonglong2 wide;
    uint2 narrow;
    int arrived, done, torn, seen;
};

struct Relaxed {
    static __device__ void store(Shared *s, unsigned i)
    {
        asm volatile("st.relaxed.gpu.v2.u32 [%0], {%1, %1};" ::"l"(&s->narrow), "r"(i) : "memory");
        asm volatile("st.relaxed.gpu.v2.u64 [%0], {%1, %1};"
                     ::"l"(&s->wide), "l"(1ull * i) : "memory");
    }
    static __device__ void load(Shared *s, uint2 &a, ulonglong2 &b)
    {
        asm volatile("ld.relaxed.gpu.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a.x), "=r"(a.y) : "l"(&s->narrow) : "memory");
        asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];"
                     : "=l"(b.x), "=l"(b.y) : "l"(&s->wide) : "memory");
    }
};

struct Uncached {
    static __device__ void store(Shared *s, unsigned i)
    {
        asm volatile("st.global.cg.v2.u32 [%0], {%1, %1};" ::"l"(&s->narrow), "r"(i) : "memory");
        asm volatile("st.global.wt.v2.u64 [%0], {%1, %1};"
                     ::"l"(&s->wide), "l"(1ull * i) : "memory");
    }
    static __device__ void load(Shared *s, uint2 &a, ulonglong2 &b)
    {
        asm volatile("ld.global.cg.v2.u32 {%0, %1}, [%2];"
                     : "=r"(a.x), "=r"(a.y) : "l"(&s->narrow) : "memory");
        asm volatile("ld.global.cv.v2.u64 {%0, %1}, [%2];"
                     : "=l"(b.x), "=l"(b.y) : "l"(&s->wide) : "memory");
    }
};

// Both blocks are there at once: the launch is cooperative.
template <class Way> __global__ void race(Shared *s)
{
    volatile int *arrived = &s->arrived, *done = &s->done;
    atomicAdd(&s->arrived, 1);
    while (*arrived < 2) {}
    if (blockIdx.x == 0) {
        for (unsigned i = 1; !*done; i++) Way::store(s, i);
        return;
    }
    int torn = 0, seen = 0;
    unsigned before = 0;
    for (int look = 0; look < LOOKS && seen < SEEN; look++) {
        uint2 a;
        ulonglong2 b;
        // Loads past a cache are weak ones all the same: without this ptxas makes one of them all.
        __threadfence_block();
        Way::load(s, a, b);
        if (a.x != a.y || b.x != b.y) torn++;
        if (a.x != before) seen++;
        before = a.x;
    }
    s->torn = torn;
    s->seen = seen;
    *done = 1;
}

template <class Way> void look()
{
    Device<Shared> shared(1);
    CUDA(cudaMemset(shared.data, 0, sizeof(Shared)));
    void *args[] = {&shared.data};
    CUDA(cudaLaunchCooperativeKernel((const void *)race<Way>, 2, 1, args));
    CUDA(cudaDeviceSynchronize());
    Shared found = shared.host()[0];
    REQUIRE(found.torn == 0);
    REQUIRE(found.seen == SEEN);
}

int main()
{
    for (int round = 0; round < ROUNDS; round++) {
        look<Relaxed>();
        look<Uncached>();
    }
    OK("%d different vectors of each kind, none torn", ROUNDS * SEEN);
}
