// 1D and 3D textures, linear memory and pitch, integer and normalised 8- and 16-bit channels.
#include "check.h"

__global__ void one(cudaTextureObject_t linear, cudaTextureObject_t bytes, cudaTextureObject_t norm, int4 *out, float *f)
{
    int i = threadIdx.x;
    out[i] = tex1Dfetch<int4>(linear, i);
    uchar4 b = tex2D<uchar4>(bytes, i % 8 + 0.5f, i / 8 + 0.5f);
    out[i].w += b.x + 2 * b.y + 3 * b.z + 4 * b.w;
    f[i] = tex1D<float>(norm, i + 0.5f);
}

__global__ void volume(cudaTextureObject_t t, float *out, int n)
{
    int x = threadIdx.x, y = threadIdx.y, z = blockIdx.x;
    out[(z * n + y) * n + x] = tex3D<float>(t, x + 1.0f, y + 0.5f, z + 0.5f);
}

template <typename F> static cudaTextureObject_t make(F fill, bool norm = false, bool smooth = false)
{
    cudaResourceDesc resource = {};
    fill(resource);
    cudaTextureDesc desc = {};
    for (auto &m : desc.addressMode) m = cudaAddressModeClamp;
    desc.filterMode = smooth ? cudaFilterModeLinear : cudaFilterModePoint;
    desc.readMode = norm ? cudaReadModeNormalizedFloat : cudaReadModeElementType;
    cudaTextureObject_t object;
    CUDA(cudaCreateTextureObject(&object, &resource, &desc, nullptr));
    return object;
}

int main()
{
    const int n = 64, v = 9;
    std::vector<int4> lin(n);
    std::vector<uchar4> bytes(n);
    std::vector<unsigned short> shorts(n);
    Random random(31);
    for (int i = 0; i < n; i++) {
        lin[i] = {i, -i, 3 * i, int(random.below(1000))};
        bytes[i] = {(unsigned char)random.next(), (unsigned char)i, 7, (unsigned char)random.next()};
        shorts[i] = random.next();
    }
    Device<int4> dlin(lin), out(n);
    uchar4 *pitched;
    size_t pitch;
    CUDA(cudaMallocPitch(&pitched, &pitch, 8 * 4, 8));
    CUDA(cudaMemcpy2D(pitched, pitch, bytes.data(), 32, 32, 8, cudaMemcpyHostToDevice));
    auto sdesc = cudaCreateChannelDesc<unsigned short>();
    cudaArray_t sarray, cube;
    CUDA(cudaMallocArray(&sarray, &sdesc, n));
    CUDA(cudaMemcpy2DToArray(sarray, 0, 0, shorts.data(), 2 * n, 2 * n, 1, cudaMemcpyHostToDevice));
    auto linear = make([&](cudaResourceDesc &r) {
        r.resType = cudaResourceTypeLinear;
        // More than there is, as some programs say.
        r.res.linear.devPtr = dlin.data, r.res.linear.sizeInBytes = n * 16 + 4096;
        r.res.linear.desc = cudaCreateChannelDesc<int4>();
    });
    auto plane = make([&](cudaResourceDesc &r) {
        r.resType = cudaResourceTypePitch2D;
        r.res.pitch2D = {pitched, cudaCreateChannelDesc<uchar4>(), 8, 8, pitch};
    });
    auto norm = make([&](cudaResourceDesc &r) { r.resType = cudaResourceTypeArray, r.res.array.array = sarray; }, true);
    Device<float> f(n);
    one<<<1, n>>>(linear, plane, norm, out, f);
    auto got = out.host();
    auto normalised = f.host();
    for (int i = 0; i < n; i++) {
        auto b = bytes[i];
        REQUIRE(got[i].x == i && got[i].y == -i && got[i].z == 3 * i);
        REQUIRE(got[i].w == lin[i].w + b.x + 2 * b.y + 3 * b.z + 4 * b.w);
        REQUIRE(close(normalised[i], shorts[i] / 65535.0, 1e-6));
    }

    std::vector<float> vol(v * v * v);
    for (auto &x : vol) x = random.uniform();
    auto fdesc = cudaCreateChannelDesc<float>();
    CUDA(cudaMalloc3DArray(&cube, &fdesc, make_cudaExtent(v, v, v)));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(vol.data(), v * 4, v, v);
    copy.dstArray = cube;
    copy.extent = make_cudaExtent(v, v, v);
    copy.kind = cudaMemcpyHostToDevice;
    CUDA(cudaMemcpy3D(&copy));
    auto t3 = make([&](cudaResourceDesc &r) { r.resType = cudaResourceTypeArray, r.res.array.array = cube; }, false, true);
    Device<float> sampled(v * v * v);
    volume<<<v, dim3(v, v)>>>(t3, sampled, v);
    auto s = sampled.host();
    for (int i = 0; i < v * v * v; i++) {
        double want = i % v == v - 1 ? vol[i] : 0.5 * (vol[i] + vol[i + 1]);
        REQUIRE(std::fabs(s[i] - want) < 0.005);
    }
    for (auto t : {linear, plane, norm, t3}) CUDA(cudaDestroyTextureObject(t));
    CUDA(cudaFreeArray(sarray));
    CUDA(cudaFreeArray(cube));
    CUDA(cudaFree(pitched));
    OK("linear, pitch, 1D, 3D");
}
