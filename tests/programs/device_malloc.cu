// malloc, free, new and delete in kernels; the heap's limit gives null, not a fault.
#include "check.h"

struct Node {
    Node *next;
    int value;
    __device__ Node(Node *n, int v) : next(n), value(v) {}
};

__global__ void build(Node **heads, int n)
{
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    Node *head = nullptr;
    for (int i = 0; i < n; i++) head = new Node(head, t + i);
    heads[t] = head;
}

__global__ void sum(Node **heads, long long *out)
{
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    long long s = 0;
    for (Node *p = heads[t]; p;) {
        Node *next = p->next;
        s += p->value;
        delete p;
        p = next;
    }
    out[t] = s;
}

__global__ void greedy(int *failed)
{
    void *p = malloc(size_t(1) << 40);
    if (!p) atomicAdd(failed, 1);
    char *q = (char *)malloc(100);
    memset(q, 7, 100);
    if (q[99] != 7) atomicAdd(failed, 1000);
    free(q);
    free(nullptr);
}

int main()
{
    const int threads = 256, n = 20;
    CUDA(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
    Device<Node *> heads(threads);
    Device<long long> out(threads);
    Device<int> failed(1);
    CUDA(cudaMemset(failed, 0, 4));
    build<<<4, 64>>>(heads, n);
    sum<<<2, 128>>>(heads, out);
    auto got = out.host();
    for (int t = 0; t < threads; t++) REQUIRE(got[t] == (long long)n * t + n * (n - 1) / 2);
    greedy<<<1, 32>>>(failed);
    REQUIRE(failed.host()[0] == 32);
    OK("%d lists", threads);
}
