// Steps of which each works on memory that the host and the device both see: pinned memory, a
// managed variable and registered memory. The host changes a part of it before each launch, the
// kernel all of it, and a host function behind it a word; what the host then finds is compared with
// what it computes. Prints as gpu_steps does. Usage: gpu_pinned STEPS MILLISECONDS
#include "steps.h"
#include <vector>

constexpr uint32_t N = 20000;

__managed__ uint32_t kept[1000];
__device__ uint32_t own[N];

__global__ void step(uint32_t *pinned, uint32_t *registered, uint32_t number)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    own[i] += pinned[i] + registered[i];
    pinned[i] = own[i] * 3 + number;
    registered[i] ^= own[i];
    if (i < 1000) kept[i] += own[i];
}

static void added(void *word) { *(uint32_t *)word += 5; }

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    uint32_t *pinned;
    CUDA(cudaHostAlloc(&pinned, N * sizeof *pinned, cudaHostAllocMapped));
    std::vector<uint32_t> registered(N, 1);
    CUDA(cudaHostRegister(registered.data(), N * sizeof(uint32_t), cudaHostRegisterMapped));
    uint32_t *seen;
    CUDA(cudaHostGetDevicePointer(&seen, registered.data(), 0));
    std::vector<uint32_t> of_pinned(N, 0), of_registered(N, 1), of_kept(1000, 0), of_own(N, 0);
    std::fill(pinned, pinned + N, 0);
    for (uint32_t number = 1; number <= steps.count; number++) {
        for (uint32_t i = number % 7; i < N; i += 97) {
            pinned[i] += number;
            registered[i] = of_registered[i] = i;
            of_pinned[i] += number;
        }
        if (number > 1) kept[number % 1000] = of_kept[number % 1000] = number;
        step<<<(N + 255) / 256, 256>>>(pinned, seen, number);
        CUDA(cudaLaunchHostFunc(nullptr, added, pinned + number % N));
        CUDA(cudaDeviceSynchronize());
        for (uint32_t i = 0; i < N; i++) {
            of_own[i] += of_pinned[i] + of_registered[i];
            of_pinned[i] = of_own[i] * 3 + number;
            of_registered[i] ^= of_own[i];
            if (i < 1000) of_kept[i] += of_own[i];
        }
        of_pinned[number % N] += 5;
        for (uint32_t i = 0; i < N; i++) {
            bool well = pinned[i] == of_pinned[i] && registered[i] == of_registered[i];
            if (!well || (i < 1000 && kept[i] != of_kept[i])) {
                std::printf("%08x: word %u of step %u is wrong\n", steps.nonce, i, number);
                return 1;
            }
        }
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
