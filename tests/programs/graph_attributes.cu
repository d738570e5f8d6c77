// A graph is made under the attributes that its kernels have then; they are set again later.
#include "check.h"
#include <chrono>
#include <thread>

const int WORDS = 64 << 8; // 64 KiB, more than a block has unasked

__global__ void turn(int *p)
{
    extern __shared__ int tile[];
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) tile[i] = p[i];
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) p[i] = tile[WORDS - 1 - i] + 1;
}

static void allow(int bytes)
{
    CUDA(cudaFuncSetAttribute(turn, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

int main()
{
    std::vector<int> numbers(WORDS);
    for (int i = 0; i < WORDS; i++) numbers[i] = i;
    Device<int> p(numbers);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    allow(WORDS * 4);
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    turn<<<1, 256, WORDS * 4, stream>>>(p);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    const int rounds = 100;
    for (int round = 0; round < rounds; round++) {
        // As libraries do before each launch: with what this one needs.
        allow(WORDS * 4 + (round % 3) * 1024);
        turn<<<1, 256, WORDS * 4, stream>>>(p);
        CUDA(cudaGetLastError());
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaStreamSynchronize(stream));
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    numbers = p.host();
    for (int i = 0; i < WORDS; i++) REQUIRE(numbers[i] == i + 2 * rounds);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    OK("%d reversals", 2 * rounds);
}
