// Counts steps on the device. Each depends on all memory of the one before (allocated, pinned,
// managed, constant, a variable), and is compared with what the host computes: what a restart has
// not brought back is found out at once. Prints a nonce, drawn at its start, with each step, as
// steps.c does. Usage: gpu_steps STEPS MILLISECONDS [MIB]     MIB: of the host's memory, of which
// each step changes a page and the last looks at all
#include "steps.h"

constexpr int N = 1 << 16;

__device__ uint32_t counter = 1;
__constant__ uint32_t salt[4];
__managed__ uint32_t managed[1024];

__global__ void step(uint32_t *state, const uint32_t *pinned, uint32_t *out, uint32_t number)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t x = state[i] ^ pinned[i % 1024] ^ salt[i % 4] ^ managed[i % 1024] ^ number;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    state[i] = x;
    atomicXor(out, x * 2654435761u);
    if (i == 0) counter = counter * 1664525u + 1013904223u;
}

__global__ void read_counter(uint32_t *out) { *out ^= counter; }

// The same, computed here.
struct Host {
    std::vector<uint32_t> state, pinned, managed, salt;
    uint32_t counter = 1;

    Host(const std::vector<uint32_t> &first, const uint32_t *p, const uint32_t *m, const uint32_t *s)
        : state(first), pinned(p, p + 1024), managed(m, m + 1024), salt(s, s + 4)
    {
    }

    uint32_t step(uint32_t number)
    {
        uint32_t out = 0;
        for (int i = 0; i < N; i++) {
            uint32_t x = state[i] ^ pinned[i % 1024] ^ salt[i % 4] ^ managed[i % 1024] ^ number;
            x ^= x << 13;
            x ^= x >> 17;
            x ^= x << 5;
            state[i] = x;
            out ^= x * 2654435761u;
        }
        counter = counter * 1664525u + 1013904223u;
        out ^= counter;
        pinned[number % 1024] ^= out;
        managed[number % 1024] += number;
        return out;
    }
};

// A word of each page that tells how often it was changed, and where it lies.
struct Ballast {
    static constexpr size_t PAGE = 1024;
    std::vector<uint32_t> words;
    std::vector<uint32_t> changed;

    explicit Ballast(size_t mib) : words(mib << 18), changed(mib << 8)
    {
        for (size_t i = 0; i < words.size(); i++) words[i] = i * 2654435761u;
    }

    void change(uint32_t number)
    {
        if (changed.empty()) return;
        size_t page = number * 2246822519u % changed.size();
        words[page * PAGE]++;
        changed[page]++;
    }

    bool right() const
    {
        for (size_t i = 0; i < words.size(); i++) {
            uint32_t more = i % PAGE ? 0 : changed[i / PAGE];
            if (words[i] != uint32_t(i * 2654435761u) + more) return false;
        }
        return true;
    }
};

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 150);
    Ballast ballast(argc > 3 ? atoi(argv[3]) : 0);
    uint32_t *state, *pinned, *out, *sum;
    CUDA(cudaMalloc(&state, N * sizeof *state));
    CUDA(cudaMalloc(&out, sizeof *out));
    CUDA(cudaMallocHost(&pinned, 1024 * sizeof *pinned));
    CUDA(cudaMallocHost(&sum, sizeof *sum));
    std::vector<uint32_t> first(N);
    for (int i = 0; i < N; i++) first[i] = i * 2246822519u + 1;
    for (int i = 0; i < 1024; i++) pinned[i] = i * 3266489917u, managed[i] = i;
    uint32_t salts[4] = {1, 22, 333, 4444};
    CUDA(cudaMemcpyToSymbol(salt, salts, sizeof salts));
    CUDA(cudaMemcpy(state, first.data(), N * sizeof *state, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));

    // Half of the work is in a graph.
    cudaGraph_t graph;
    cudaGraphExec_t instance;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    read_counter<<<1, 1, 0, stream>>>(out);
    CUDA(cudaMemcpyAsync(sum, out, sizeof *out, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&instance, graph, 0));
    CUDA(cudaGraphDestroy(graph));

    Host host(first, pinned, managed, salts);
    for (uint32_t number = 1; number <= steps.count; number++) {
        CUDA(cudaMemsetAsync(out, 0, sizeof *out, stream));
        CUDA(cudaEventRecord(begin, stream));
        step<<<N / 256, 256, 0, stream>>>(state, pinned, out, number);
        CUDA(cudaEventRecord(end, stream));
        CUDA(cudaGraphLaunch(instance, stream));
        CUDA(cudaStreamSynchronize(stream));
        float elapsed;
        CUDA(cudaEventElapsedTime(&elapsed, begin, end));
        if (*sum != host.step(number)) {
            std::printf("%08x: step %u is wrong\n", steps.nonce, number);
            return 1;
        }
        pinned[number % 1024] ^= *sum;
        managed[number % 1024] += number;
        ballast.change(number);
        steps.done(number);
        steps.rest();
    }
    REQUIRE(ballast.right());
    return steps.well();
}
