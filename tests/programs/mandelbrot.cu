// Escape times in double precision: data-dependent loops, equal to the host's to the last pixel.
#include "check.h"

__host__ __device__ inline int escape(double cx, double cy, int limit)
{
    double x = 0, y = 0;
    int i = 0;
    // Fused on neither side: explicit roundings.
#ifdef __CUDA_ARCH__
#define MUL(a, b) __dmul_rn(a, b)
#define ADD(a, b) __dadd_rn(a, b)
#else
    volatile double t;
#define MUL(a, b) (t = (a) * (b))
#define ADD(a, b) ((a) + (b))
#endif
    while (i < limit) {
        double xx = MUL(x, x), yy = MUL(y, y), xy = MUL(x, y);
        if (ADD(xx, yy) > 4) break;
        x = ADD(ADD(xx, -yy), cx), y = ADD(ADD(xy, xy), cy), i++;
    }
    return i;
}

__global__ void draw(int *out, int w, int h, int limit)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < w && y < h) out[y * w + x] = escape(x * 3.0 / w - 2.0, y * 2.0 / h - 1.0, limit);
}

int main()
{
    const int w = 320, h = 200, limit = 200;
    Device<int> d(w * h);
    draw<<<dim3((w + 15) / 16, (h + 15) / 16), dim3(16, 16)>>>(d, w, h, limit);
    auto got = d.host();
    long long total = 0;
    for (int i = 0; i < w * h; i++) {
        REQUIRE(got[i] == escape(i % w * 3.0 / w - 2.0, i / w * 2.0 / h - 1.0, limit));
        total += got[i];
    }
    OK("%dx%d, %lld iterations", w, h, total);
}
