// Every kind of memory, allocated, copied, filled, checked and freed by eight threads at once.
// build: -Xcompiler -pthread
#include "check.h"
#include <cstring>
#include <thread>

enum Kind { Plain, Pool, Pinned, Managed, Registered, Kinds };

struct Memory {
    Kind kind;
    void *host = nullptr, *device = nullptr;

    Memory(Kind kind, size_t bytes, cudaStream_t s) : kind(kind)
    {
        switch (kind) {
        case Plain: CUDA(cudaMalloc(&device, bytes)); break;
        case Pool: CUDA(cudaMallocAsync(&device, bytes, s)); break;
        case Pinned: CUDA(cudaMallocHost(&host, bytes)); device = host; break;
        case Managed: CUDA(cudaMallocManaged(&device, bytes)); break;
        default:
            // Whole pages, so that no other thread writes to them while they are registered.
            host = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
            CUDA(cudaHostRegister(host, bytes, cudaHostRegisterMapped));
            CUDA(cudaHostGetDevicePointer(&device, host, 0));
        }
    }

    void free(cudaStream_t s)
    {
        switch (kind) {
        case Plain:
        case Managed: CUDA(cudaFree(device)); break;
        case Pool: CUDA(cudaFreeAsync(device, s)); break;
        case Pinned: CUDA(cudaFreeHost(host)); break;
        default: CUDA(cudaHostUnregister(host)); std::free(host);
        }
    }
};

static void work(int thread)
{
    Random random(thread + 1);
    cudaStream_t s;
    CUDA(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    for (int round = 0; round < 60; round++) {
        size_t bytes = 1 + random.below(300000);
        std::vector<unsigned char> in(bytes), out(bytes);
        for (auto &x : in) x = (unsigned char)random.next();
        Memory memory(Kind(random.below(Kinds)), bytes, s);
        CUDA(cudaMemcpyAsync(memory.device, in.data(), bytes, cudaMemcpyDefault, s));
        CUDA(cudaMemcpyAsync(out.data(), memory.device, bytes, cudaMemcpyDefault, s));
        CUDA(cudaStreamSynchronize(s));
        REQUIRE(in == out);
        CUDA(cudaMemsetAsync(memory.device, round, bytes, s));
        CUDA(cudaMemcpyAsync(out.data(), memory.device, bytes, cudaMemcpyDefault, s));
        CUDA(cudaStreamSynchronize(s));
        for (unsigned char x : out) REQUIRE(x == round);
        if (memory.host) REQUIRE(((unsigned char *)memory.host)[bytes - 1] == round);
        memory.free(s);
    }
    CUDA(cudaStreamDestroy(s));
}

int main()
{
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++) threads.emplace_back(work, i);
    for (auto &t : threads) t.join();
    CUDA(cudaDeviceSynchronize());
    OK("8 threads, 60 rounds");
}
