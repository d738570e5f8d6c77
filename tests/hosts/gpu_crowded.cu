// Threads launch kernels on managed memory without rest, which has all of the device, and another
// one allocates most of the device, again and again: that succeeds, and what the kernels write is
// there at the end.
// Usage: gpu_crowded [MIB of the device]
#include "../programs/check.h"
#include <atomic>
#include <thread>

__global__ void add(unsigned *words, size_t n)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        words[i] += 1;
}

int main(int argc, char **argv)
{
    const size_t mib = argc > 1 ? atoi(argv[1]) : 64, n = mib << 17, some = 64 << 10;
    std::atomic<bool> over{false};
    unsigned *words[2], counts[2] = {};
    for (auto &each : words) CUDA(cudaMallocManaged(&each, n * sizeof **words));
    PRELOAD(add);
    auto launches = [&](int which) {
        cudaStream_t stream;
        CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        while (!over.load()) {
            add<<<4, 64, 0, stream>>>(words[which], some);
            CUDA(cudaGetLastError());
            // Never idle, and never far behind.
            if (++counts[which] % 16 == 0) CUDA(cudaStreamSynchronize(stream));
        }
        CUDA(cudaStreamSynchronize(stream));
    };
    std::thread one(launches, 0), other(launches, 1);
    for (int turn = 0; turn < 40; turn++) {
        void *large;
        CUDA(cudaMalloc(&large, mib * 3 << 18));
        CUDA(cudaFree(large));
    }
    over.store(true);
    one.join();
    other.join();
    for (int which = 0; which < 2; which++)
        for (size_t i = 0; i < n; i++) REQUIRE(words[which][i] == (i < some ? counts[which] : 0));
    OK("%d launches", counts[0] > 0 && counts[1] > 0);
}
