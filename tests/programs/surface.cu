// Surfaces: 2D and layered writes and reads, then the same array read through a texture.
#include "check.h"

__global__ void paint(cudaSurfaceObject_t s, int w, int h)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < w && y < h) surf2Dwrite(make_float2(x + 0.5f, y * 100.0f), s, x * sizeof(float2), y);
}

__global__ void transpose(cudaSurfaceObject_t s, float *out, int w, int h)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= w || y >= h) return;
    float2 v = surf2Dread<float2>(s, x * sizeof(float2), y);
    out[x * h + y] = v.x + v.y;
}

__global__ void layers(cudaSurfaceObject_t s, int w)
{
    int x = threadIdx.x, layer = blockIdx.x;
    surf2DLayeredwrite<unsigned>(x * 10 + layer, s, x * 4, 0, layer);
    // Outside: dropped, zero or clamped as asked.
    surf2DLayeredwrite<unsigned>(99, s, (w + x) * 4, 0, layer, cudaBoundaryModeZero);
}

int main()
{
    const int w = 45, h = 31;
    auto desc = cudaCreateChannelDesc<float2>();
    cudaArray_t array;
    CUDA(cudaMallocArray(&array, &desc, w, h, cudaArraySurfaceLoadStore));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray, resource.res.array.array = array;
    cudaSurfaceObject_t surface;
    CUDA(cudaCreateSurfaceObject(&surface, &resource));
    dim3 grid((w + 15) / 16, (h + 15) / 16), block(16, 16);
    Device<float> out(w * h);
    paint<<<grid, block>>>(surface, w, h);
    transpose<<<grid, block>>>(surface, out, w, h);
    auto got = out.host();
    for (int x = 0; x < w; x++)
        for (int y = 0; y < h; y++) REQUIRE(got[x * h + y] == x + 0.5f + y * 100.0f);
    std::vector<float2> back(w * h);
    CUDA(cudaMemcpy2DFromArray(back.data(), w * 8, array, 0, 0, w * 8, h, cudaMemcpyDeviceToHost));
    for (int i = 0; i < w * h; i++) REQUIRE(back[i].x == i % w + 0.5f && back[i].y == i / w * 100.0f);

    auto udesc = cudaCreateChannelDesc<unsigned>();
    cudaArray_t layered;
    CUDA(cudaMalloc3DArray(&layered, &udesc, make_cudaExtent(16, 1, 3), cudaArrayLayered | cudaArraySurfaceLoadStore));
    resource.res.array.array = layered;
    cudaSurfaceObject_t many;
    CUDA(cudaCreateSurfaceObject(&many, &resource));
    layers<<<3, 16>>>(many, 16);
    std::vector<unsigned> u(48);
    cudaMemcpy3DParms copy = {};
    copy.srcArray = layered;
    copy.dstPtr = make_cudaPitchedPtr(u.data(), 64, 16, 1);
    copy.extent = make_cudaExtent(16, 1, 3);
    copy.kind = cudaMemcpyDeviceToHost;
    CUDA(cudaMemcpy3D(&copy));
    for (int i = 0; i < 48; i++) REQUIRE(u[i] == unsigned(i % 16 * 10 + i / 16));
    CUDA(cudaDestroySurfaceObject(surface));
    CUDA(cudaDestroySurfaceObject(many));
    CUDA(cudaFreeArray(array));
    CUDA(cudaFreeArray(layered));
    OK("%dx%d and 3 layers", w, h);
}
