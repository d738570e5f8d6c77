// Takes device memory until there is no more, in pieces, and tells how much that was and what the
// device says of itself. Then it gives one piece back, takes it again, and waits for its standard
// input to end. Usage: gpu_quota MIB (of a piece)
#include "../programs/check.h"
#include <cstdlib>
#include <vector>

int main(int argc, char **argv)
{
    size_t mib = argc > 1 ? strtoul(argv[1], nullptr, 10) : 8, piece = mib << 20, free, total, left;
    int devices;
    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaMemGetInfo(&free, &total));
    std::vector<void *> taken;
    cudaError_t error;
    void *more = nullptr;
    while ((error = cudaMalloc(&more, piece)) == cudaSuccess) {
        CUDA(cudaMemset(more, 1, piece));
        taken.push_back(more);
    }
    if (error != cudaErrorMemoryAllocation) return std::printf("%s\n", cudaGetErrorName(error)), 1;
    (void)cudaGetLastError();
    CUDA(cudaMemGetInfo(&left, &total));
    if (!taken.empty()) {
        CUDA(cudaFree(taken.back()));
        CUDA(cudaMalloc(&taken.back(), piece));
    }
    std::printf("devices %d total %zu free %zu taken %zu left %zu\n", devices, total >> 20, free >> 20, taken.size() * mib,
                left >> 20);
    std::fflush(stdout);
    while (std::getchar() != EOF) {
    }
    return 0;
}
