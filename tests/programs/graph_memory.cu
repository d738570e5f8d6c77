// Memory that graphs allocate and free, by nodes and by capture; a captured launch of a graph.
#include "check.h"

const int N = 1000;

__global__ void add(int *p, int n, int by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += by;
}

static void thrice(cudaGraph_t graph, cudaStream_t stream, std::vector<int> &out, int want)
{
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 3; round++) {
        out.assign(N, 0);
        CUDA(cudaGraphLaunch(exec, stream));
        CUDA(cudaStreamSynchronize(stream));
        REQUIRE(out[0] == want && out[N - 1] == want);
    }
    CUDA(cudaGraphExecDestroy(exec));
}

int main()
{
    std::vector<int> out(N);
    cudaStream_t stream, other;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));

    cudaGraph_t graph;
    CUDA(cudaGraphCreate(&graph, 0));
    cudaMemAllocNodeParams memory = {};
    memory.poolProps.allocType = cudaMemAllocationTypePinned;
    memory.poolProps.location.type = cudaMemLocationTypeDevice;
    memory.bytesize = N * sizeof(int);
    cudaGraphNode_t alloc, clear, store, release;
    CUDA(cudaGraphAddMemAllocNode(&alloc, graph, nullptr, 0, &memory));
    REQUIRE(memory.dptr != nullptr);
    cudaMemsetParams nine = {};
    nine.dst = memory.dptr;
    nine.value = 9;
    nine.elementSize = 4;
    nine.width = N;
    nine.height = 1;
    CUDA(cudaGraphAddMemsetNode(&clear, graph, &alloc, 1, &nine));
    CUDA(cudaGraphAddMemcpyNode1D(&store, graph, &clear, 1, out.data(), memory.dptr, memory.bytesize,
                                  cudaMemcpyDeviceToHost));
    CUDA(cudaGraphAddMemFreeNode(&release, graph, &store, 1, memory.dptr));
    thrice(graph, stream, out, 9);
    CUDA(cudaGraphDestroy(graph));

    // The branch's stream goes before the capture ends.
    cudaEvent_t fork, join;
    CUDA(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
    CUDA(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
    int *temporary;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA(cudaMallocAsync(&temporary, N * sizeof(int), stream));
    CUDA(cudaMemsetAsync(temporary, 0, N * sizeof(int), stream));
    CUDA(cudaEventRecord(fork, stream));
    CUDA(cudaStreamWaitEvent(other, fork, 0));
    add<<<4, 256, 0, other>>>(temporary, N, 6);
    CUDA(cudaEventRecord(join, other));
    CUDA(cudaStreamWaitEvent(stream, join, 0));
    CUDA(cudaStreamDestroy(other));
    CUDA(cudaMemcpyAsync(out.data(), temporary, N * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaFreeAsync(temporary, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    thrice(graph, stream, out, 6);
    CUDA(cudaGraphDestroy(graph));

    // An executable graph cannot be launched into a capture, and the attempt spoils it.
    Device<int> sum(N);
    CUDA(cudaMemset(sum, 0, N * sizeof(int)));
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    add<<<4, 256, 0, stream>>>(sum, N, 1);
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaGraphLaunch(exec, stream));
    EXPECT(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    cudaGetLastError();
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    REQUIRE(sum.host()[N - 1] == 2);
    OK("allocated in graphs six times");
}
