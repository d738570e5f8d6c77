// Copies so many MiB to a device and back, and compares them. Prints how many milliseconds that
// took. Usage: gpu_crosses MIB
#include "../programs/check.h"
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <vector>

int main(int argc, char **argv)
{
    size_t words = (argc > 1 ? strtoul(argv[1], nullptr, 10) : 4) << 18;
    std::vector<uint32_t> there(words), back(words);
    uint32_t x = 2463534242u;
    // Nothing that becomes shorter on its way.
    for (uint32_t &word : there) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        word = x;
    }
    void *memory = nullptr;
    CUDA(cudaMalloc(&memory, words * sizeof(uint32_t)));
    auto begin = std::chrono::steady_clock::now();
    CUDA(cudaMemcpy(memory, there.data(), words * sizeof(uint32_t), cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(back.data(), memory, words * sizeof(uint32_t), cudaMemcpyDeviceToHost));
    auto took = std::chrono::steady_clock::now() - begin;
    if (there != back) return std::printf("what has come back is not what was sent\n"), 1;
    auto milliseconds = std::chrono::duration_cast<std::chrono::milliseconds>(took).count();
    std::printf("%lld\n", static_cast<long long>(milliseconds));
    return 0;
}
