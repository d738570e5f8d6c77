// Small managed allocations, as many as the argument says: a list through all of them, objects with
// virtual functions, by host and device in turn; freed out of order, and their room used again.
#include "check.h"
#include <new>

struct Node {
    Node *next;
    int value;
};

__global__ void walk(Node *head, long long *sum)
{
    for (Node *at = head; at; at = at->next) {
        *sum += at->value;
        at->value = -at->value;
    }
}

struct Shape {
    int size;
    __device__ explicit Shape(int size) : size(size) {}
    __device__ virtual int area() const = 0;
};

struct Square : Shape {
    __device__ explicit Square(int size) : Shape(size) {}
    __device__ int area() const override { return size * size; }
};

struct Line : Shape {
    __device__ explicit Line(int size) : Shape(size) {}
    __device__ int area() const override { return size; }
};

__global__ void make(Shape **at, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        if (i % 2) new (at[i]) Square(i);
        else new (at[i]) Line(i);
    }
}

__global__ void measure(Shape *const *at, int n, int *areas)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) areas[i] = at[i]->area();
}

template <class T> T *managed(size_t n = 1)
{
    T *p;
    CUDA(cudaMallocManaged(&p, n * sizeof(T)));
    return p;
}

static void list(const int count)
{
    std::vector<Node *> nodes;
    Node *head = nullptr;
    long long *sum = managed<long long>(), expected = 0;
    *sum = 0;
    for (int i = 0; i < count; i++) {
        Node *node = managed<Node>();
        *node = {head, i};
        nodes.push_back(head = node);
        expected += i;
    }
    walk<<<1, 1>>>(head, sum);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(*sum == expected);
    for (int i = 0; i < count; i += 17) {
        REQUIRE(nodes[i]->value == -i);
        nodes[i]->value = 0;
        expected -= i;
    }
    walk<<<1, 1>>>(head, sum);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(*sum == (long long)count * (count - 1) / 2 - expected);
    // Every other one goes, and larger ones take their room as far as they fit.
    for (int i = 0; i < count; i += 2) CUDA(cudaFree(nodes[i]));
    std::vector<Node *> more;
    for (int i = 0; i < 500; i++) {
        more.push_back(managed<Node>(i % 2 ? 1 : 1000));
        more[i][0] = {i ? more[i - 1] : nullptr, 3};
    }
    *sum = 0;
    walk<<<1, 1>>>(more.back(), sum);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(*sum == 1500);
    for (int i = 1; i < count; i += 2) {
        if (i % 1001 == 0) REQUIRE(nodes[i]->value == (i % 17 ? i : 0));
        CUDA(cudaFree(nodes[i]));
    }
    for (Node *node : more) CUDA(cudaFree(node));
    CUDA(cudaFree(sum));
}

// Their tables of functions are the device's; the host has their other members.
static void objects()
{
    const int n = 500;
    Shape **all = managed<Shape *>(n);
    int *areas = managed<int>(n);
    for (int i = 0; i < n; i++) all[i] = i % 2 ? (Shape *)managed<Square>() : (Shape *)managed<Line>();
    make<<<1, 256>>>(all, n);
    for (int round = 0; round < 3; round++) {
        measure<<<1, 256>>>(all, n, areas);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < n; i++) {
            int size = i + (i % 5 == 0 ? round : 0);
            REQUIRE(areas[i] == (i % 2 ? size * size : size));
            if (i % 5 == 0) REQUIRE(all[i]->size++ == size);
        }
    }
    for (int i = 0; i < n; i++) CUDA(cudaFree(all[i]));
    CUDA(cudaFree(all));
    CUDA(cudaFree(areas));
}

int main(int argc, char **argv)
{
    const int count = argc > 1 ? std::atoi(argv[1]) : 500;
    list(count);
    objects();
    OK("%d allocations", count);
}
