// State that is not bulk memory, for `checkpoint objects`: variables of every kind, a virtual
// function's table, pointers from one to another.
#include <new>

struct Shape {
    __device__ virtual int area() const { return 0; }
};

struct Square : Shape {
    int side;
    __device__ Square(int side) : side(side) {}
    __device__ int area() const override { return side * side; }
};

__device__ int counter = 7;
static __device__ unsigned long long hidden[4];
__constant__ float table[16] = {1, 2, 3};
__managed__ int shared_word = 5;
__device__ int *pointer;
__device__ int big[1000];
__device__ Shape *made;
__device__ alignas(8) unsigned char place[sizeof(Square)];
namespace {
__device__ short unnamed = 3;
}

extern "C" __global__ void bump(int *out, int n) {
    static __device__ int inside = 11;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i == 0) {
        pointer = &counter;
        inside++;
        unnamed++;
        hidden[1] += 3;
        shared_word += 2;
        made = new (place) Square(5);
    }
    if (i < n) {
        out[i] = atomicAdd(&counter, 1) + (int)table[i % 16] + inside + big[i % 1000];
    }
}

extern "C" __global__ void report(long long *out) {
    if (blockIdx.x || threadIdx.x) return;
    long long all[] = {counter, (long long)hidden[1], shared_word, unnamed, made ? made->area() : -1,
                       (long long)pointer, (long long)&counter, (long long)(table[1] * 1000)};
    for (int i = 0; i < 8; i++) out[i] = all[i];
    big[5]++;
}

extern "C" __global__ void fetch(cudaTextureObject_t texture, float *out) {
    out[threadIdx.x] = tex2D<float>(texture, threadIdx.x + 0.5f, 1.5f);
}
