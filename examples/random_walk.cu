// A million walkers on the device take random steps; the host prints how far they have come. Takes
// some seconds: long enough to be checkpointed, killed and restarted meanwhile.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

#define CUDA(call)                                                                       \
    do {                                                                                 \
        cudaError_t status = (call);                                                     \
        if (status != cudaSuccess) {                                                     \
            std::fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(status));         \
            std::exit(1);                                                                \
        }                                                                                \
    } while (0)

constexpr int walkers = 1 << 20, rounds = 8;

__global__ void walk(int *place, unsigned *state, int steps)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned x = state[i];
    int at = place[i];
    for (int step = 0; step < steps; step++) {
        x ^= x << 13, x ^= x >> 17, x ^= x << 5;
        at += (x & 1) ? 1 : -1;
    }
    place[i] = at;
    state[i] = x;
}

__global__ void seed(unsigned *state)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    state[i] = 2654435761u * (i + 1);
}

__global__ void sum_of_squares(const int *place, unsigned long long *sum)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(sum, (unsigned long long)(place[i] * place[i]));
}

int main()
{
    int *place;
    unsigned *state;
    unsigned long long *sum;
    CUDA(cudaMalloc(&place, walkers * sizeof *place));
    CUDA(cudaMalloc(&state, walkers * sizeof *state));
    CUDA(cudaMallocManaged(&sum, sizeof *sum));
    CUDA(cudaMemset(place, 0, walkers * sizeof *place));
    seed<<<walkers / 256, 256>>>(state);
    for (int round = 1; round <= rounds; round++) {
        walk<<<walkers / 256, 256>>>(place, state, 16);
        CUDA(cudaDeviceSynchronize());
        *sum = 0;
        sum_of_squares<<<walkers / 256, 256>>>(place, sum);
        CUDA(cudaDeviceSynchronize());
        std::printf("round %d of %d: %.4f from home on average\n", round, rounds,
                    std::sqrt((double)*sum / walkers));
        std::fflush(stdout);
        usleep(600000);
    }
    return 0;
}
