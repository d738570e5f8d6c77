// Copies to pageable memory that overlap land in the order of their stream, whatever their sizes
// and places are: the newest bytes stay. Two threads do so at a time, each with a stream; what
// came back is compared with the same copies of a plain model.
#include "check.h"
#include <cstring>
#include <thread>

static const size_t MIB = 1 << 20, HOST = 6 * MIB;
static const int ROUNDS = 3, COPIES = 8;

// What is at a place of a device's memory after so many rounds.
static __host__ __device__ unsigned char value(size_t at, unsigned seed)
{
    return (unsigned char)((at * 2654435761u + seed * 40503u) >> 13);
}

__global__ void fill(unsigned char *data, size_t count, unsigned seed)
{
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
        data[i] = value(i, seed);
}

static void side(unsigned number, bool *well)
{
    Random random(number);
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    Device<unsigned char> device(HOST);
    std::vector<unsigned char> host(HOST), model(HOST), there(HOST);
    for (unsigned round = 0; round < ROUNDS; round++) {
        unsigned seed = 100 * number + round;
        fill<<<64, 128, 0, stream>>>(device, HOST, seed);
        for (size_t i = 0; i < HOST; i++) there[i] = value(i, seed);
        for (int copy = 0; copy < COPIES; copy++) {
            static const size_t lengths[] = {1, 5000, 300000, MIB, 2 * MIB + 77, 5 * MIB};
            size_t length = lengths[random.below(6)];
            size_t from = random.below(HOST - length), to = random.below(HOST - length);
            // Every third goes the other way, out of what the others have brought.
            if (copy % 3 == 2) {
                CUDA(cudaMemcpyAsync(device + to, host.data() + from, length,
                                     cudaMemcpyHostToDevice, stream));
                std::memcpy(&there[to], &model[from], length);
            } else {
                CUDA(cudaMemcpyAsync(host.data() + to, device + from, length,
                                     cudaMemcpyDeviceToHost, stream));
                std::memcpy(&model[to], &there[from], length);
            }
        }
        CUDA(cudaStreamSynchronize(stream));
        if (host != model) return;
    }
    // What a graph has written it reads again: twice in a row, and the newest stays.
    Device<unsigned char> second(HOST);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CUDA(cudaMemcpyAsync(host.data(), device, HOST, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemcpyAsync(second, host.data(), HOST, cudaMemcpyHostToDevice, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned seed : {7 * round + number, 7 * round + number + 50}) {
            fill<<<64, 128, 0, stream>>>(device, HOST, seed);
            CUDA(cudaGraphLaunch(exec, stream));
            for (size_t i = 0; i < HOST; i++) model[i] = value(i, seed);
        }
        CUDA(cudaStreamSynchronize(stream));
        if (host != model || second.host() != model) return;
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaStreamDestroy(stream));
    *well = true;
}

int main()
{
    PRELOAD(fill);
    bool well[2] = {};
    std::thread first(side, 1, &well[0]), second(side, 2, &well[1]);
    first.join();
    second.join();
    REQUIRE(well[0]);
    REQUIRE(well[1]);
    OK("%d copies", 2 * ROUNDS * COPIES);
}
