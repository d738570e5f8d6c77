// Managed memory page by page: host and device in turn on whole arrays, parts of pages and
// unaligned ends, by kernels, copies, fills, prefetches, streams, host functions and system calls.
#include "check.h"
#include <cstring>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

__global__ void add(int *p, int n, int by)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += by;
}

struct Node {
    Node *next;
    int value;
};

__global__ void walk(Node *head, int *sum)
{
    int total = 0;
    for (Node *at = head; at; at = at->next) {
        total += at->value;
        at->value = -at->value;
    }
    *sum = total;
}

template <class T> T *managed(size_t n)
{
    T *p;
    CUDA(cudaMallocManaged(&p, n * sizeof(T)));
    memset((void *)p, 0, n * sizeof(T));
    return p;
}

// Each side changes a few elements, here and there, and reads what the other has changed.
static void turns()
{
    const int n = 300000;
    int *p = managed<int>(n);
    for (int i = 0; i < n; i++) REQUIRE(p[i] == 0);
    for (int round = 1; round <= 4; round++) {
        for (int i = 0; i < n; i += 1000) p[i] += round;
        add<<<4, 64>>>(p + 7, n - 11, 1);
        add<<<4, 64>>>(p + 5000, 1, 10);
        CUDA(cudaDeviceSynchronize());
        REQUIRE(p[6] == 0 && p[7] == round && p[n - 4] == 0 && p[n - 5] == round);
        REQUIRE(p[5000] == 10 * round + round + round * (round + 1) / 2);
        for (int i = 10000; i < n - 10; i += 1000) REQUIRE(p[i] == round + round * (round + 1) / 2);
    }
    CUDA(cudaFree(p));
}

// Pages here and there, of several blocks, of which the program has locked one in memory.
static void scattered()
{
    const int page = 1024, pages = 2048;
    int *p = managed<int>(page * pages);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < pages; i += 3) p[i * page] = 100 * round + i;
        if (round == 0) REQUIRE(mlock(p + 300 * page, 4096) == 0);
        add<<<8, 64>>>(p, page * pages, 1);
        CUDA(cudaDeviceSynchronize());
        for (int i = 0; i < pages; i += 3) REQUIRE(p[i * page] == 100 * round + i + 1);
        REQUIRE(p[page] == round + 1 && p[1999 * page] == round + 1);
    }
    REQUIRE(munlock(p + 300 * page, 4096) == 0);
    CUDA(cudaFree(p));
}

// A list whose links are managed addresses, in many small allocations.
static void links()
{
    Node *head = nullptr;
    int expected = 0;
    for (int i = 1; i <= 500; i++) {
        Node *node = managed<Node>(1);
        *node = {head, i};
        head = node;
        expected += i;
    }
    int *sum = managed<int>(1);
    walk<<<1, 1>>>(head, sum);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(*sum == expected);
    while (head) {
        Node *next = head->next;
        expected += head->value;
        CUDA(cudaFree(head));
        head = next;
    }
    REQUIRE(expected == 0);
    CUDA(cudaFree(sum));
}

static void copies()
{
    const int n = 5000;
    int *p = managed<int>(n), *q = managed<int>(n), *d;
    CUDA(cudaMalloc(&d, n * sizeof(int)));
    std::vector<int> own(n, 3);
    for (int i = 0; i < n; i++) p[i] = i;
    CUDA(cudaMemcpy(q + 1, p, (n - 2) * sizeof(int), cudaMemcpyDefault));
    CUDA(cudaMemcpy(p + 100, own.data(), 10 * sizeof(int), cudaMemcpyHostToDevice));
    for (int i = 0; i < n; i++) REQUIRE(p[i] == (i >= 100 && i < 110 ? 3 : i));
    q[0] = q[n - 1] = -1;
    CUDA(cudaMemcpy(d, q, n * sizeof(int), cudaMemcpyDeviceToDevice));
    CUDA(cudaMemcpy(own.data(), d, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) REQUIRE(own[i] == (i == 0 || i == n - 1 ? -1 : i - 1));
    p[99] = 1;
    CUDA(cudaMemset(p + 100, 0xff, 4000 * sizeof(int)));
    CUDA(cudaDeviceSynchronize());
    REQUIRE(p[99] == 1 && p[100] == -1 && p[4099] == -1 && p[4100] == 4100);
    CUDA(cudaFree(p));
    CUDA(cudaFree(q));
    CUDA(cudaFree(d));
}

static void streams()
{
    const int n = 20000;
    cudaStream_t stream[2];
    int *p[2];
    for (int s = 0; s < 2; s++) {
        CUDA(cudaStreamCreate(&stream[s]));
        p[s] = managed<int>(n);
        CUDA(cudaStreamAttachMemAsync(stream[s], p[s]));
        CUDA(cudaStreamSynchronize(stream[s]));
    }
    for (int round = 0; round < 5; round++) {
        for (int s = 0; s < 2; s++) add<<<4, 64, 0, stream[s]>>>(p[s], n, s + 1);
        for (int s = 0; s < 2; s++) {
            CUDA(cudaStreamSynchronize(stream[s]));
            REQUIRE(p[s][0] == 2 * round * (s + 1) + s + 1 && p[s][n - 1] == p[s][0]);
            for (int i = 0; i < n; i++) p[s][i] += s + 1;
        }
    }
    // A host function of the stream may touch what is attached to it.
    struct Pass { int *p, n; bool right; } pass = {p[0], n, false};
    add<<<4, 64, 0, stream[0]>>>(p[0], n, 1);
    CUDA(cudaLaunchHostFunc(stream[0], [](void *of) {
        Pass *pass = (Pass *)of;
        pass->right = pass->p[0] == 11;
        pass->p[pass->n - 1] = 100;
    }, &pass));
    add<<<4, 64, 0, stream[0]>>>(p[0], n, 1);
    CUDA(cudaStreamSynchronize(stream[0]));
    REQUIRE(pass.right && p[0][0] == 12 && p[0][n - 1] == 101);
    for (int s = 0; s < 2; s++) {
        CUDA(cudaFree(p[s]));
        CUDA(cudaStreamDestroy(stream[s]));
    }
}

// Threads of the host's touch different parts of the same pages.
static void threads()
{
    const int n = 40000, each = 4;
    int *p = managed<int>(n);
    add<<<4, 64>>>(p, n, 1);
    CUDA(cudaDeviceSynchronize());
    std::vector<std::thread> all;
    for (int t = 0; t < each; t++) all.emplace_back([=] {
        for (int i = t; i < n; i += each) p[i] += t;
    });
    for (auto &thread : all) thread.join();
    add<<<4, 64>>>(p, n, 1);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(p[i] == 2 + i % each);
    CUDA(cudaFree(p));
}

static void hints_and_calls()
{
    const int n = 30000;
    int *p = managed<int>(n);
    for (int i = 0; i < n; i++) p[i] = i;
#if CUDART_VERSION >= 13000
    cudaMemLocation device = {cudaMemLocationTypeDevice, 0}, host = {cudaMemLocationTypeHost, 0};
    CUDA(cudaMemPrefetchAsync(p, n * sizeof(int), device, 0, 0));
    add<<<4, 64>>>(p, n, 1);
    CUDA(cudaMemPrefetchAsync(p, n * sizeof(int), host, 0, 0));
#else
    add<<<4, 64>>>(p, n, 1);
#endif
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i += 50) REQUIRE(p[i] == i + 1);
    add<<<4, 64>>>(p, n, 1);
    CUDA(cudaDeviceSynchronize());
    // The kernel touches the pages on the program's behalf.
    int ends[2], back[2000];
    REQUIRE(pipe(ends) == 0);
    REQUIRE(write(ends[1], p + 3000, sizeof back) == (ssize_t)sizeof back);
    REQUIRE(read(ends[0], back, sizeof back) == (ssize_t)sizeof back);
    for (int i = 0; i < 2000; i++) {
        REQUIRE(back[i] == 3002 + i);
        back[i] = -i;
    }
    REQUIRE(write(ends[1], back, sizeof back) == (ssize_t)sizeof back);
    REQUIRE(read(ends[0], p + 9000, sizeof back) == (ssize_t)sizeof back);
    add<<<4, 64>>>(p, n, 1);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < 2000; i++) REQUIRE(p[9000 + i] == 1 - i);
    REQUIRE(p[8999] == 9002 && p[11000] == 11003);
    close(ends[0]);
    close(ends[1]);
    CUDA(cudaFree(p));
}

int main()
{
    turns();
    scattered();
    links();
    copies();
    streams();
    threads();
    hints_and_calls();
    OK("managed pages");
}
