// Blurs images: one goes to the device, ten passes run there, it comes back.
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

__global__ void blur(const unsigned char *in, unsigned char *out, int w, int h) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y;
    if (x < 1 || x >= w - 1 || y < 1 || y >= h - 1) return;
    int i = y * w + x;
    out[i] = (4 * in[i] + in[i - 1] + in[i + 1] + in[i - w] + in[i + w]) / 8;
}

int main(int argc, char **argv) {
    int images = argc > 1 ? atoi(argv[1]) : 8, w = 1024, h = 512, wrong = 0;
    std::vector<unsigned char> image(w * h);
    unsigned char *a, *b;
    cudaMalloc(&a, w * h), cudaMalloc(&b, w * h);
    for (int k = 0; k < images; k++) {
        for (int i = 0; i < w * h; i++) image[i] = (i * 2654435761u >> 24) / 2 + 64;
        cudaMemcpy(a, image.data(), w * h, cudaMemcpyHostToDevice);
        cudaMemcpy(b, a, w * h, cudaMemcpyDeviceToDevice);
        for (int pass = 0; pass < 10; pass++, std::swap(a, b))
            blur<<<dim3(w / 128, h), 128>>>(a, b, w, h);
        if (cudaMemcpy(image.data(), a, w * h, cudaMemcpyDeviceToHost) != cudaSuccess) return 1;
        for (int i = 0; i < w; i++) wrong += abs(image[h / 2 * w + i] - 126) > 64;
    }
    printf("%d images, %d wrong\n", images, wrong);
    return wrong != 0;
}
