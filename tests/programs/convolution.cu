// Separable convolution: the filter in constant memory, rows and columns with halos in shared.
#include "check.h"

const int R = 8;
__constant__ float filter[2 * R + 1];

template <bool Rows> __global__ void convolve(const float *in, float *out, int w, int h)
{
    __shared__ float s[64 + 2 * R];
    int line = blockIdx.y, base = blockIdx.x * 64, length = Rows ? w : h;
    auto at = [=](int i) { return Rows ? line * w + i : i * w + line; };
    for (int i = threadIdx.x; i < 64 + 2 * R; i += blockDim.x) {
        int p = base + i - R;
        s[i] = p >= 0 && p < length ? in[at(p)] : 0.0f;
    }
    __syncthreads();
    int p = base + threadIdx.x;
    if (p >= length) return;
    float sum = 0;
    for (int j = -R; j <= R; j++) sum += filter[j + R] * s[threadIdx.x + R - j];
    out[at(p)] = sum;
}

int main()
{
    const int w = 200, h = 131;
    Random random(16);
    std::vector<float> in(w * h), f(2 * R + 1);
    for (auto &x : in) x = random.uniform();
    for (auto &x : f) x = random.uniform();
    CUDA(cudaMemcpyToSymbol(filter, f.data(), f.size() * sizeof(float)));
    Device<float> a(in), b(w * h), c(w * h);
    convolve<true><<<dim3((w + 63) / 64, h), 64>>>(a, b, w, h);
    convolve<false><<<dim3((h + 63) / 64, w), 64>>>(b, c, w, h);
    auto got = c.host();
    for (int y = 0; y < h; y += 7)
        for (int x = 0; x < w; x += 5) {
            double want = 0;
            for (int j = -R; j <= R; j++)
                for (int i = -R; i <= R; i++)
                    if (x - i >= 0 && x - i < w && y - j >= 0 && y - j < h)
                        want += double(f[i + R]) * f[j + R] * in[(y - j) * w + x - i];
            REQUIRE(close(got[y * w + x], want, 1e-5));
        }
    OK("%dx%d, radius %d", w, h, R);
}
