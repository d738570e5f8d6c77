// Loads that compilers widen and mask: the last 12 bytes of memory and of parameters, read as 16.
// build: {cuda}
#include "check.h"
#include <cuda.h>

static const char *source = R"(
.version 8.0
.target sm_70
.address_size 64
.visible .entry last(.param .u64 from, .param .u64 to, .param .align 16 .b8 three[12])
{
    .reg .u32 a, b, c, d;
    .reg .u64 f, t;
    ld.param.u64 f, [from];
    ld.param.u64 t, [to];
    // NVVM says by .pragma "used_bytes_mask 4095" that it needs twelve of the sixteen bytes.
    ld.global.v4.u32 {a, b, c, d}, [f + 16];
    add.u32 a, a, b;
    add.u32 a, a, c;
    st.global.u32 [t], a;
    ld.param.v4.u32 {a, b, c, d}, [three];
    add.u32 a, a, b;
    add.u32 a, a, c;
    st.global.u32 [t + 4], a;
    ret;
}
)";

int main()
{
    CUDA(cudaFree(nullptr));
    CUmodule module;
    CUfunction last;
    DRIVER(cuModuleLoadData(&module, source));
    DRIVER(cuModuleGetFunction(&last, module, "last"));
    std::vector<int> words = {1, 2, 3, 4, 50, 600, 7000};
    Device<int> to(2), from(words);
    int three[] = {8, 90, 1000};
    int *pooled, *a = from, *b = to;
    CUDA(cudaMallocAsync(&pooled, 28, 0));
    CUDA(cudaMemcpy(pooled, words.data(), 28, cudaMemcpyHostToDevice));
    for (int *each : {a, pooled}) {
        void *params[] = {&each, &b, three};
        DRIVER(cuLaunchKernel(last, 1, 1, 1, 1, 1, 1, 0, 0, params, nullptr));
        REQUIRE(to.host()[0] == 7650 && to.host()[1] == 1098);
    }
    CUDA(cudaFreeAsync(pooled, 0));
    CUDA(cudaDeviceSynchronize());
    OK("28 bytes");
}
