// The device's side of mpi_device.c: words that each step changes on the device, compared with what
// the host computes. A library, so that any compiler of an MPI's can link it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <vector>

constexpr int N = 1 << 14;

#define CHECK(call)                                                                                \
    do {                                                                                           \
        cudaError_t error = (call);                                                                \
        if (error != cudaSuccess) {                                                                \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error));                         \
            exit(3);                                                                               \
        }                                                                                          \
    } while (0)

__host__ __device__ uint32_t mixed(uint32_t word, uint32_t theirs, uint32_t number)
{
    uint32_t x = word ^ theirs ^ number;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return x;
}

__global__ void step(uint32_t *state, const uint32_t *theirs, uint32_t number)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    state[i] = mixed(state[i], theirs[i], number);
}

static uint32_t *state, *theirs;
static cudaStream_t stream;
static std::vector<uint32_t> expected(N);

// Begins with words that follow from `seed`; two buffers of WORDS words for messages.
extern "C" void device_begin(uint32_t seed, uint32_t **out, uint32_t **in)
{
    for (int i = 0; i < N; i++) expected[i] = (seed + i) * 2654435761u;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&state, N * sizeof *state));
    CHECK(cudaMalloc(&theirs, N * sizeof *theirs));
    CHECK(cudaMallocHost(out, N * sizeof **out));
    CHECK(cudaMallocHost(in, N * sizeof **in));
    CHECK(cudaMemcpy(state, expected.data(), N * sizeof *state, cudaMemcpyHostToDevice));
}

// What the device has goes to `out`.
extern "C" void device_out(uint32_t *out)
{
    CHECK(cudaMemcpyAsync(out, state, N * sizeof *out, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
}

// Mixes what has come into what the device has. Whether that is what the host makes of it.
extern "C" int device_step(const uint32_t *in, uint32_t *out, uint32_t number)
{
    CHECK(cudaMemcpyAsync(theirs, in, N * sizeof *in, cudaMemcpyHostToDevice, stream));
    step<<<N / 256, 256, 0, stream>>>(state, theirs, number);
    CHECK(cudaGetLastError());
    device_out(out);
    int right = 1;
    for (int i = 0; i < N; i++) {
        expected[i] = mixed(expected[i], in[i], number);
        right &= out[i] == expected[i];
    }
    return right;
}
