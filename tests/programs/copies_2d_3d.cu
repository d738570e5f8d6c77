// Pitched and three-dimensional copies in every direction, with offsets.
#include "check.h"

__global__ void bump(cudaPitchedPtr p, int w, int h, int d)
{
    int x = threadIdx.x, y = blockIdx.x, z = blockIdx.y;
    if (x < w && y < h && z < d) {
        char *slice = (char *)p.ptr + z * p.pitch * h;
        ((short *)(slice + y * p.pitch))[x] += 1000;
    }
}

int main()
{
    const int w = 37, h = 11, d = 5;
    std::vector<short> in(w * h * d), out(w * h * d, -1);
    for (int i = 0; i < w * h * d; i++) in[i] = short(i);
    cudaExtent extent = make_cudaExtent(w * 2, h, d);
    cudaPitchedPtr a, b;
    CUDA(cudaMalloc3D(&a, extent));
    CUDA(cudaMalloc3D(&b, extent));
    REQUIRE(a.pitch >= w * 2 && a.pitch % 32 == 0);
    cudaMemcpy3DParms p = {};
    p.srcPtr = make_cudaPitchedPtr(in.data(), w * 2, w, h), p.dstPtr = a, p.extent = extent;
    p.kind = cudaMemcpyHostToDevice;
    CUDA(cudaMemcpy3D(&p));
    bump<<<dim3(h, d), 64>>>(a, w, h, d);
    p = {}, p.srcPtr = a, p.dstPtr = b, p.extent = extent, p.kind = cudaMemcpyDeviceToDevice;
    CUDA(cudaMemcpy3DAsync(&p, 0));
    p = {}, p.srcPtr = b, p.dstPtr = make_cudaPitchedPtr(out.data(), w * 2, w, h);
    // All but the first plane and the first row of each.
    p.srcPos = make_cudaPos(0, 1, 1), p.dstPos = make_cudaPos(0, 1, 1);
    p.extent = make_cudaExtent(w * 2, h - 1, d - 1), p.kind = cudaMemcpyDeviceToHost;
    CUDA(cudaMemcpy3D(&p));
    for (int i = 0; i < w * h * d; i++) {
        bool copied = i / (w * h) >= 1 && i / w % h >= 1;
        REQUIRE(out[i] == (copied ? in[i] + 1000 : -1));
    }

    int *plane;
    size_t pitch;
    CUDA(cudaMallocPitch(&plane, &pitch, 100 * 4, 20));
    std::vector<int> src(100 * 20), dst(50 * 10);
    for (int i = 0; i < 2000; i++) src[i] = i;
    CUDA(cudaMemset2D(plane, pitch, 0x11, 400, 20));
    CUDA(cudaMemcpy2D(plane, pitch, src.data(), 400, 400, 20, cudaMemcpyHostToDevice));
    CUDA(cudaMemset2D((char *)plane + 3 * pitch + 40, pitch, 0, 80, 4));
    CUDA(cudaMemcpy2D(dst.data(), 200, (char *)plane + 2 * pitch + 20, pitch, 200, 10, cudaMemcpyDeviceToHost));
    for (int y = 0; y < 10; y++)
        for (int x = 0; x < 50; x++) {
            int sy = y + 2, sx = x + 5;
            bool cleared = sy >= 3 && sy < 7 && sx >= 10 && sx < 30;
            REQUIRE(dst[y * 50 + x] == (cleared ? 0 : sy * 100 + sx));
        }
    // A host pointer that was never set is refused, and the program lives on.
    EXPECT(cudaErrorInvalidValue, cudaMemcpy(plane, nullptr, 64, cudaMemcpyHostToDevice));
    EXPECT(cudaErrorInvalidValue, cudaMemcpy(nullptr, plane, 64, cudaMemcpyDeviceToHost));
    (void)cudaGetLastError();
    CUDA(cudaFree(plane));
    CUDA(cudaFree(a.ptr));
    CUDA(cudaFree(b.ptr));
    OK("%dx%dx%d", w, h, d);
}
