// 2D texture objects: point and linear filters, clamp, wrap, mirror and border, normalised reads.
#include "check.h"

__global__ void sample(cudaTextureObject_t t, const float2 *at, float *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = tex2D<float>(t, at[i].x, at[i].y);
}

const int W = 19, H = 13;

static int fold(int i, int n, cudaTextureAddressMode mode)
{
    if (mode == cudaAddressModeWrap) return ((i % n) + n) % n;
    if (mode == cudaAddressModeMirror) {
        int j = ((i % (2 * n)) + 2 * n) % (2 * n);
        return j < n ? j : 2 * n - 1 - j;
    }
    if (mode == cudaAddressModeBorder) return i < 0 || i >= n ? -1 : i;
    return std::min(std::max(i, 0), n - 1);
}

static double texel(const std::vector<float> &v, int x, int y, cudaTextureAddressMode mode)
{
    x = fold(x, W, mode), y = fold(y, H, mode);
    return x < 0 || y < 0 ? 0.0 : v[y * W + x];
}

int main()
{
    Random random(30);
    std::vector<float> v(W * H);
    for (auto &x : v) x = random.uniform();
    auto format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    CUDA(cudaMallocArray(&array, &format, W, H));
    CUDA(cudaMemcpy2DToArray(array, 0, 0, v.data(), W * 4, W * 4, H, cudaMemcpyHostToDevice));
    const int n = 2000;
    int checks = 0;
    for (int normalized : {0, 1})
        for (auto mode : {cudaAddressModeClamp, cudaAddressModeBorder, cudaAddressModeWrap, cudaAddressModeMirror})
            for (auto filter : {cudaFilterModePoint, cudaFilterModeLinear}) {
                if (!normalized && (mode == cudaAddressModeWrap || mode == cudaAddressModeMirror)) continue;
                cudaResourceDesc resource = {};
                resource.resType = cudaResourceTypeArray;
                resource.res.array.array = array;
                cudaTextureDesc desc = {};
                desc.addressMode[0] = desc.addressMode[1] = mode;
                desc.filterMode = filter;
                desc.normalizedCoords = normalized;
                cudaTextureObject_t object;
                CUDA(cudaCreateTextureObject(&object, &resource, &desc, nullptr));
                // Coordinates in sixteenths of a texel, off the edges where rounding decides.
                std::vector<float2> at(n);
                for (auto &p : at) {
                    float x = (int(random.below(3 * W * 16)) - W * 16) / 16.0f + 1 / 32.0f;
                    float y = (int(random.below(3 * H * 16)) - H * 16) / 16.0f + 1 / 32.0f;
                    p = normalized ? make_float2(x / W, y / H) : make_float2(x, y);
                }
                Device<float2> dat(at);
                Device<float> out(n);
                sample<<<(n + 127) / 128, 128>>>(object, dat, out, n);
                auto got = out.host();
                for (int i = 0; i < n; i++, checks++) {
                    double x = at[i].x * (normalized ? W : 1.0), y = at[i].y * (normalized ? H : 1.0), want;
                    if (filter == cudaFilterModePoint) {
                        want = texel(v, int(std::floor(x)), int(std::floor(y)), mode);
                    } else {
                        x -= 0.5, y -= 0.5;
                        int ix = int(std::floor(x)), iy = int(std::floor(y));
                        double a = x - ix, b = y - iy;
                        want = (1 - a) * (1 - b) * texel(v, ix, iy, mode) + a * (1 - b) * texel(v, ix + 1, iy, mode)
                             + (1 - a) * b * texel(v, ix, iy + 1, mode) + a * b * texel(v, ix + 1, iy + 1, mode);
                    }
                    // Weights have eight bits of fraction.
                    REQUIRE(std::fabs(got[i] - want) < (filter == cudaFilterModePoint ? 1e-6 : 0.012));
                }
                CUDA(cudaDestroyTextureObject(object));
            }
    CUDA(cudaFreeArray(array));
    OK("%d samples", checks);
}
