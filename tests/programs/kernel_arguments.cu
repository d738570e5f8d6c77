// Arguments of every size: chars, structs, arrays in structs, more than 4 KiB in all.
#include "check.h"

struct Big {
    double d[100];
    char c[13];
    short s;
};
struct Huge {
    int v[4000];
};

__global__ void mixed(char a, double b, short c, float3 d, Big e, const __grid_constant__ Huge h, bool f, double *out)
{
    int i = threadIdx.x;
    const int *p = h.v + i * 40;
    out[i] = a + b + c + d.x + d.y + d.z + e.d[i] + e.c[i % 13] + e.s + (f ? 0.5 : 0) + p[i % 7];
}

int main()
{
    Big big;
    Huge huge;
    for (int i = 0; i < 100; i++) big.d[i] = i * 1.5;
    for (int i = 0; i < 13; i++) big.c[i] = char(i - 6);
    for (int i = 0; i < 4000; i++) huge.v[i] = i * 3;
    big.s = -1000;
    Device<double> out(100);
    mixed<<<1, 100>>>('x', 0.25, -7, make_float3(1, 2, 3), big, huge, true, out);
    CUDA(cudaGetLastError());
    auto got = out.host();
    for (int i = 0; i < 100; i++) {
        double want = 'x' + 0.25 - 7 + 6 + i * 1.5 + (i % 13 - 6) - 1000 + 0.5 + (i * 40 + i % 7) * 3;
        REQUIRE(got[i] == want);
    }
    OK("%zu bytes", sizeof(Big) + sizeof(Huge));
}
