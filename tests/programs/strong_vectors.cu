// Vectors that one block stores and another loads meanwhile are seen whole, as CUB's scans rely on:
// a value beside the flag that says that it is there.
#include "check.h"

__global__ void race(uint2 *narrow, ulonglong2 *wide, int *torn, int rounds)
{
    for (int i = 1; i <= rounds; i++) {
        uint2 a;
        ulonglong2 b;
        if (blockIdx.x == 0) {
            asm volatile("st.relaxed.gpu.v2.u32 [%0], {%1, %1};" ::"l"(narrow), "r"(i) : "memory");
            asm volatile("st.relaxed.gpu.v2.u64 [%0], {%1, %1};"
                         ::"l"(wide), "l"(1ull * i) : "memory");
        } else {
            asm volatile("ld.relaxed.gpu.v2.u32 {%0, %1}, [%2];"
                         : "=r"(a.x), "=r"(a.y) : "l"(narrow) : "memory");
            asm volatile("ld.relaxed.gpu.v2.u64 {%0, %1}, [%2];"
                         : "=l"(b.x), "=l"(b.y) : "l"(wide) : "memory");
            if (a.x != a.y || b.x != b.y) atomicAdd(torn, 1);
        }
    }
}

int main()
{
    Device<uint2> narrow(1);
    Device<ulonglong2> wide(1);
    Device<int> torn(1);
    CUDA(cudaMemset(narrow.data, 0, sizeof(uint2)));
    CUDA(cudaMemset(wide.data, 0, sizeof(ulonglong2)));
    CUDA(cudaMemset(torn.data, 0, sizeof(int)));
    race<<<2, 1>>>(narrow.data, wide.data, torn.data, 1000000);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(torn.host()[0] == 0);
    OK("two million vectors, none torn");
}
