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
    cudaGraphExec_t exec;
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

    // Rounds that take more memory together than there is: each has what the one before has freed.
    size_t available, total;
    CUDA(cudaMemGetInfo(&available, &total));
    size_t third = available / 3 / 256 * 256;
    Device<int> seen(N);
    CUDA(cudaMemset(seen, 0, N * sizeof(int)));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int round = 0; round < 8; round++) {
        CUDA(cudaMallocAsync(&temporary, third, stream));
        CUDA(cudaMemcpyAsync(temporary, seen, N * sizeof(int), cudaMemcpyDeviceToDevice, stream));
        add<<<4, 256, 0, stream>>>(temporary, N, round);
        CUDA(cudaMemcpyAsync(seen, temporary, N * sizeof(int), cudaMemcpyDeviceToDevice, stream));
        CUDA(cudaFreeAsync(temporary, stream));
    }
    CUDA(cudaMemcpyAsync(out.data(), seen, N * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaMemsetAsync(seen, 0, N * sizeof(int), stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    thrice(graph, stream, out, 28);
    CUDA(cudaGraphDestroy(graph));

    // Two allocations that live at once are apart, and a third takes the place of one that is
    // freed.
    cudaGraphNode_t two[2], fills[2], copies[2], frees[2], third_alloc;
    void *at[2];
    CUDA(cudaGraphCreate(&graph, 0));
    for (int i = 0; i < 2; i++) {
        memory.dptr = nullptr;
        CUDA(cudaGraphAddMemAllocNode(&two[i], graph, nullptr, 0, &memory));
        at[i] = memory.dptr;
        nine.dst = at[i];
        nine.value = 20 + i;
        CUDA(cudaGraphAddMemsetNode(&fills[i], graph, &two[i], 1, &nine));
    }
    REQUIRE(at[0] != at[1]);
    for (int i = 0; i < 2; i++) {
        CUDA(cudaGraphAddMemcpyNode1D(&copies[i], graph, fills, 2, out.data() + i * (N / 2), at[i],
                                      N / 2 * sizeof(int), cudaMemcpyDeviceToHost));
        CUDA(cudaGraphAddMemFreeNode(&frees[i], graph, &copies[i], 1, at[i]));
    }
    CUDA(cudaGraphAddMemAllocNode(&third_alloc, graph, &frees[0], 1, &memory));
    REQUIRE(memory.dptr != at[1]);
    nine.dst = memory.dptr;
    nine.value = 77;
    CUDA(cudaGraphAddMemsetNode(&clear, graph, &third_alloc, 1, &nine));
    CUDA(cudaGraphAddMemFreeNode(&release, graph, &clear, 1, memory.dptr));
    {
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        for (int round = 0; round < 3; round++) {
            CUDA(cudaGraphLaunch(exec, stream));
            CUDA(cudaStreamSynchronize(stream));
            REQUIRE(out[0] == 20 && out[N / 2 - 1] == 20 && out[N / 2] == 21 && out[N - 1] == 21);
        }
        CUDA(cudaGraphExecDestroy(exec));
    }
    CUDA(cudaGraphDestroy(graph));

    // What a launch has allocated outlives its graph until it is freed, and is counted until then.
    uint64_t before, used, high, reserved, left, none = 0;
    CUDA(cudaDeviceGraphMemTrim(0));
    CUDA(cudaDeviceSetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &none));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &before));
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CUDA(cudaMallocAsync(&temporary, 1 << 20, stream));
    CUDA(cudaMemsetAsync(temporary, 5, 1 << 20, stream));
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &used));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrReservedMemCurrent, &reserved));
    REQUIRE(used >= before + (1 << 20) && reserved >= used);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaMemcpy(out.data(), temporary, N * sizeof(int), cudaMemcpyDeviceToHost));
    REQUIRE(out[0] == 0x05050505 && out[N - 1] == 0x05050505);
    CUDA(cudaFreeAsync(temporary, stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &left));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemHigh, &high));
    REQUIRE(left <= used && high >= used);
    // A driver may count what was freed until it gives it back.
    CUDA(cudaDeviceGraphMemTrim(0));
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrUsedMemCurrent, &left));
    REQUIRE(left < used);
    CUDA(cudaDeviceGetGraphMemAttribute(0, cudaGraphMemAttrReservedMemCurrent, &left));
    REQUIRE(left < reserved);

    // An executable graph cannot be launched into a capture, and the attempt spoils it.
    Device<int> sum(N);
    CUDA(cudaMemset(sum, 0, N * sizeof(int)));
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
