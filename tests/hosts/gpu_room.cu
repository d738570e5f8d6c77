// Takes device memory in pieces of 16 MiB, fills it, checks it, says so, and ends.
// Usage: gpu_room MIB
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

constexpr size_t PIECE = 16 << 20;

__global__ void fill(unsigned *words, size_t n, unsigned first)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        words[i] = first + (unsigned)i;
}

int main(int, char **argv)
{
    std::vector<unsigned *> pieces;
    for (size_t left = strtoull(argv[1], nullptr, 10) << 20; left >= PIECE; left -= PIECE) {
        unsigned *piece;
        const cudaError_t error = cudaMalloc(&piece, PIECE);
        if (error != cudaSuccess) {
            printf("%s after %zu\n", cudaGetErrorName(error), pieces.size());
            return 1;
        }
        fill<<<4, 64>>>(piece, PIECE / 4, (unsigned)pieces.size());
        pieces.push_back(piece);
    }
    std::vector<unsigned> back(PIECE / 4);
    for (unsigned number = 0; number < pieces.size(); number++) {
        if (cudaMemcpy(back.data(), pieces[number], PIECE, cudaMemcpyDefault) != cudaSuccess) return 2;
        for (size_t i = 0; i < back.size(); i++)
            if (back[i] != number + (unsigned)i) return 3;
    }
    printf("has %zu\n", pieces.size());
    return 0;
}
