// Layered textures, cubemaps, and mipmaps with a level of detail.
#include "check.h"

__global__ void layered(cudaTextureObject_t t, float *out, int w, int h, int layer)
{
    int x = threadIdx.x, y = blockIdx.x;
    out[y * w + x] = tex2DLayered<float>(t, (x + 0.5f) / w, (y + 0.5f) / h, layer);
}

__global__ void faces(cudaTextureObject_t t, const float3 *directions, float *out)
{
    float3 d = directions[threadIdx.x];
    out[threadIdx.x] = texCubemap<float>(t, d.x, d.y, d.z);
}

__global__ void levels(cudaTextureObject_t t, float4 *out, float step)
{
    out[threadIdx.x] = tex2DLod<float4>(t, 0.5f, 0.5f, threadIdx.x * step);
}

static cudaTextureObject_t texture(cudaResourceDesc resource, cudaTextureFilterMode filter, float last)
{
    cudaTextureDesc desc = {};
    desc.normalizedCoords = 1;
    desc.filterMode = desc.mipmapFilterMode = filter;
    desc.maxMipmapLevelClamp = last;
    cudaTextureObject_t made;
    CUDA(cudaCreateTextureObject(&made, &resource, &desc, nullptr));
    return made;
}

static cudaArray_t array(const std::vector<float> &data, cudaExtent extent, unsigned flags)
{
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t made;
    CUDA(cudaMalloc3DArray(&made, &format, extent, flags));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr((void *)data.data(), extent.width * 4, extent.width, extent.height);
    copy.dstArray = made;
    copy.extent = extent;
    copy.kind = cudaMemcpyHostToDevice;
    CUDA(cudaMemcpy3D(&copy));
    return made;
}

static void check_layers()
{
    const int w = 32, h = 16, n = 5;
    std::vector<float> data(w * h * n);
    for (size_t i = 0; i < data.size(); i++) data[i] = float(i);
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array(data, make_cudaExtent(w, h, n), cudaArrayLayered);
    cudaTextureObject_t t = texture(resource, cudaFilterModePoint, 0);
    Device<float> out(w * h);
    for (int layer = 0; layer < n; layer++) {
        layered<<<h, w>>>(t, out, w, h, layer);
        std::vector<float> got = out.host();
        for (int i = 0; i < w * h; i++) REQUIRE(got[i] == data[layer * w * h + i]);
    }
    CUDA(cudaDestroyTextureObject(t));
    CUDA(cudaFreeArray(resource.res.array.array));
}

static void check_cubemap()
{
    const int n = 8;
    std::vector<float> data(n * n * 6);
    for (size_t i = 0; i < data.size(); i++) data[i] = float(i / (n * n));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array(data, make_cudaExtent(n, n, 6), cudaArrayCubemap);
    cudaTextureObject_t t = texture(resource, cudaFilterModePoint, 0);
    std::vector<float3> directions = {{1, .1f, .2f}, {-1, .3f, .1f}, {.1f, 1, .4f}, {.2f, -1, .1f}, {.3f, .1f, 1}, {.1f, .2f, -1}};
    Device<float3> in(directions);
    Device<float> out(6);
    faces<<<1, 6>>>(t, in, out);
    std::vector<float> got = out.host();
    for (int face = 0; face < 6; face++) REQUIRE(got[face] == face);
    CUDA(cudaDestroyTextureObject(t));
    CUDA(cudaFreeArray(resource.res.array.array));
}

static void check_mipmaps()
{
    const int n = 16, count = 5;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float4>();
    cudaMipmappedArray_t mipmap;
    CUDA(cudaMallocMipmappedArray(&mipmap, &format, make_cudaExtent(n, n, 0), count));
    for (int l = 0; l < count; l++) {
        size_t side = n >> l;
        std::vector<float4> data(side * side, make_float4(l, 10 * l, 1, 2));
        cudaArray_t level;
        CUDA(cudaGetMipmappedArrayLevel(&level, mipmap, l));
        CUDA(cudaMemcpy2DToArray(level, 0, 0, data.data(), side * 16, side * 16, side, cudaMemcpyHostToDevice));
        cudaExtent extent;
        CUDA(cudaArrayGetInfo(&format, &extent, nullptr, level));
        REQUIRE(extent.width == side && extent.height == side && format.w == 32);
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = mipmap;
    cudaTextureObject_t t = texture(resource, cudaFilterModeLinear, count - 1);
    Device<float4> out(9);
    levels<<<1, 9>>>(t, out, 0.5f);
    std::vector<float4> got = out.host();
    for (int i = 0; i < 9; i++) {
        float lod = 0.5f * i;
        REQUIRE(std::fabs(got[i].x - lod) < 0.01f && std::fabs(got[i].y - 10 * lod) < 0.1f);
        REQUIRE(got[i].z == 1 && got[i].w == 2);
    }
    CUDA(cudaDestroyTextureObject(t));
    CUDA(cudaFreeMipmappedArray(mipmap));
}

int main()
{
    check_layers();
    check_cubemap();
    check_mipmaps();
    OK("5 layers, 6 faces, 5 levels");
}
