// Constant memory: initialised, written from the host, indexed per lane, its address taken.
#include "check.h"

struct Poly {
    double c[4];
    int degree;
};
__constant__ Poly poly = {{1.0, -2.0, 0.5, 0.25}, 3};
__constant__ int table[64];
__constant__ int *pointer;
__device__ int target = 5;

__global__ void run(double *out, int *looked, int n)
{
    int i = threadIdx.x;
    double x = i * 0.125, y = 0;
    for (int d = poly.degree; d >= 0; d--) y = y * x + poly.c[d];
    out[i] = y;
    const int *t = table + i / 2;
    looked[i] = t[(i * 7) % 32] + *pointer;
}

int main()
{
    std::vector<int> host(64);
    for (int i = 0; i < 64; i++) host[i] = i * i;
    CUDA(cudaMemcpyToSymbol(table, host.data(), 256));
    int *address, five = 5;
    CUDA(cudaGetSymbolAddress((void **)&address, target));
    CUDA(cudaMemcpyToSymbol(pointer, &address, sizeof address));
    Device<double> out(64);
    Device<int> looked(64);
    run<<<1, 64>>>(out, looked, 64);
    auto y = out.host();
    auto l = looked.host();
    for (int i = 0; i < 64; i++) {
        double x = i * 0.125;
        REQUIRE(close(y[i], 1 - 2 * x + 0.5 * x * x + 0.25 * x * x * x, 1e-14));
        REQUIRE(l[i] == host[i / 2 + i * 7 % 32] + five);
    }
    size_t size;
    CUDA(cudaGetSymbolSize(&size, table));
    REQUIRE(size == 256);
    Poly back;
    CUDA(cudaMemcpyFromSymbol(&back, poly, sizeof back));
    REQUIRE(back.degree == 3 && back.c[3] == 0.25);
    OK("64 lanes");
}
