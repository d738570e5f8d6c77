// Classes with virtual functions, built and called on the device, lanes of a warp divergent.
#include "check.h"

struct Shape {
    __device__ virtual float area() const = 0;
    __device__ virtual int sides() const { return 0; }
    __device__ virtual ~Shape() {}
};
struct Circle : Shape {
    float r;
    __device__ explicit Circle(float r) : r(r) {}
    __device__ float area() const override { return 3.0f * r * r; }
};
struct Box : Shape {
    float a, b;
    __device__ Box(float a, float b) : a(a), b(b) {}
    __device__ float area() const override { return a * b; }
    __device__ int sides() const override { return 4; }
};
struct Square : Box {
    __device__ explicit Square(float a) : Box(a, a) {}
    __device__ int sides() const override { return Box::sides() + 100; }
};

__global__ void make(Shape **shapes, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    if (i % 3 == 0) shapes[i] = new Circle(i);
    else if (i % 3 == 1) shapes[i] = new Box(i, 2);
    else shapes[i] = new Square(i);
}

__global__ void measure(Shape **shapes, float2 *out, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    out[i] = {shapes[i]->area(), float(shapes[i]->sides())};
    delete shapes[i];
}

int main()
{
    const int n = 1000;
    Device<Shape *> shapes(n);
    Device<float2> out(n);
    make<<<4, 256>>>(shapes, n);
    measure<<<8, 128>>>(shapes, out, n);
    CUDA(cudaGetLastError());
    auto got = out.host();
    for (int i = 0; i < n; i++) {
        float f = float(i), area = i % 3 == 0 ? 3 * f * f : i % 3 == 1 ? 2 * f : f * f;
        REQUIRE(got[i].x == area && got[i].y == (i % 3 == 0 ? 0 : i % 3 == 1 ? 4 : 104));
    }
    OK("%d objects", n);
}
