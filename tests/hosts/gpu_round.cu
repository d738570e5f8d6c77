// Steps that go around all devices: each takes the words of the device before, by an event and a
// copy from device to device, and mixes them with its own, with a variable, and with pinned memory
// that all of them and the host see. What the last one has is compared with what the host computes.
// Prints as gpu_steps does. Usage: gpu_round STEPS MILLISECONDS [MIB]     MIB: of each device, more
#include "steps.h"
#include <vector>

constexpr uint32_t N = 20000, BOTH = 512;

__device__ uint32_t rounds = 7;
__constant__ uint32_t salt;

__global__ void mix(uint32_t *own, const uint32_t *before, uint32_t *both, uint32_t number, uint32_t device)
{
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= N) return;
    uint32_t x = own[i] * 1664525u + before[i] + salt + both[i % BOTH] + number;
    own[i] = x ^ x >> 15;
    if (i == 0) rounds += device + 1;
}

__global__ void mark(uint32_t *both, uint32_t number)
{
    both[threadIdx.x] = both[threadIdx.x] * 3 + number + rounds;
}

static void added(void *word) { *(uint32_t *)word += 5; }

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    size_t more = (argc > 3 ? atoi(argv[3]) : 0) * size_t(1 << 20);
    int count;
    CUDA(cudaGetDeviceCount(&count));
    uint32_t *both;
    CUDA(cudaHostAlloc(&both, BOTH * 4, cudaHostAllocPortable | cudaHostAllocMapped));
    std::vector<uint32_t *> own(count), before(count);
    std::vector<unsigned char *> ballast(count);
    std::vector<cudaStream_t> stream(count);
    std::vector<cudaEvent_t> done(count);
    std::vector<std::vector<uint32_t>> model(count, std::vector<uint32_t>(N));
    std::vector<uint32_t> seen(BOTH), got(N), turned(count, 7);
    for (uint32_t i = 0; i < BOTH; i++) both[i] = seen[i] = i * 31;
    for (int device = 0; device < count; device++) {
        uint32_t own_salt = 100 + device;
        CUDA(cudaSetDevice(device));
        CUDA(cudaMalloc(&own[device], N * 4));
        CUDA(cudaMalloc(&before[device], N * 4));
        for (uint32_t i = 0; i < N; i++) model[device][i] = i * 2246822519u + device;
        CUDA(cudaMemcpy(own[device], model[device].data(), N * 4, cudaMemcpyHostToDevice));
        CUDA(cudaMemcpyToSymbol(salt, &own_salt, 4));
        CUDA(cudaStreamCreateWithFlags(&stream[device], cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&done[device], cudaEventDisableTiming));
        if (more) {
            CUDA(cudaMalloc(&ballast[device], more));
            CUDA(cudaMemset(ballast[device], 17 + device, more));
        }
        CUDA(cudaDeviceSynchronize());
    }
    CUDA(cudaSetDevice(count - 1));
    CUDA(cudaEventRecord(done[count - 1], stream[count - 1]));
    for (uint32_t number = 1; number <= steps.count; number++) {
        for (int device = 0; device < count; device++) {
            int last = (device + count - 1) % count;
            cudaStream_t at = stream[device];
            CUDA(cudaSetDevice(device));
            CUDA(cudaStreamWaitEvent(at, done[last], 0));
            CUDA(cudaMemcpyPeerAsync(before[device], device, own[last], last, N * 4, at));
            mix<<<(N + 255) / 256, 256, 0, at>>>(own[device], before[device], both, number, device);
            CUDA(cudaLaunchHostFunc(at, added, both + (number + device) % BOTH));
            mark<<<1, BOTH, 0, at>>>(both, number);
            CUDA(cudaEventRecord(done[device], at));
        }
        CUDA(cudaMemcpyAsync(got.data(), own[count - 1], N * 4, cudaMemcpyDeviceToHost,
                             stream[count - 1]));
        CUDA(cudaStreamSynchronize(stream[count - 1]));
        for (int device = 0; device < count; device++) {
            const std::vector<uint32_t> &from = model[(device + count - 1) % count];
            for (uint32_t i = 0; i < N; i++) {
                uint32_t x = model[device][i] * 1664525u + from[i] + 100 + device + seen[i % BOTH] + number;
                model[device][i] = x ^ x >> 15;
            }
            turned[device] += device + 1;
            seen[(number + device) % BOTH] += 5;
            for (uint32_t i = 0; i < BOTH; i++) seen[i] = seen[i] * 3 + number + turned[device];
        }
        bool well = got == model[count - 1];
        for (uint32_t i = 0; i < BOTH; i++) well &= both[i] == seen[i];
        if (!well) {
            std::printf("%08x: step %u is wrong\n", steps.nonce, number);
            return 1;
        }
        steps.done(number);
        steps.rest();
    }
    for (int device = 0; device < count; device++) {
        uint32_t value;
        CUDA(cudaSetDevice(device));
        CUDA(cudaMemcpyFromSymbol(&value, rounds, 4));
        REQUIRE(value == turned[device]);
        std::vector<unsigned char> all(more);
        if (more) CUDA(cudaMemcpy(all.data(), ballast[device], more, cudaMemcpyDeviceToHost));
        for (unsigned char byte : all) REQUIRE(byte == 17 + device);
    }
    return steps.well();
}
