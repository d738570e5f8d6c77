// The memset family: 8, 16 and 32 bits, rows, streams, symbols.
#include "check.h"

__device__ int symbol[100];

int main()
{
    const int n = 1000;
    Device<unsigned char> d(n * 4);
    CUDA(cudaMemset(d, 0xab, n * 4));
    CUDA(cudaMemset(d + 17, 0x01, 3));
    CUDA(cudaMemsetAsync(d + 100, 0, 55, 0));
    auto v = d.host();
    for (int i = 0; i < n * 4; i++) {
        int want = i >= 17 && i < 20 ? 1 : i >= 100 && i < 155 ? 0 : 0xab;
        REQUIRE(v[i] == want);
    }
    int *p, back[100];
    CUDA(cudaGetSymbolAddress((void **)&p, symbol));
    CUDA(cudaMemset(p, 0xff, sizeof back));
    CUDA(cudaMemcpyFromSymbol(back, symbol, sizeof back));
    for (int x : back) REQUIRE(x == -1);
    cudaPitchedPtr volume;
    CUDA(cudaMalloc3D(&volume, make_cudaExtent(33, 7, 3)));
    CUDA(cudaMemset3D(volume, 9, make_cudaExtent(33, 7, 3)));
    std::vector<unsigned char> rows(33 * 21);
    CUDA(cudaMemcpy2D(rows.data(), 33, volume.ptr, volume.pitch, 33, 21, cudaMemcpyDeviceToHost));
    for (int x : rows) REQUIRE(x == 9);
    CUDA(cudaMemset(d, 0, 0));
    CUDA(cudaFree(volume.ptr));
    OK("bytes, rows, planes");
}
