// Small pitched copies from pageable memory, enqueued behind host functions and in graphs behind
// them.
#include "check.h"
#include <cstring>

static const int rows = 4, bytes = 16;

static void CUDART_CB mark(void *data) { ++*(int *)data; }

int main()
{
    char *device, host[rows * bytes], back[rows * bytes];
    size_t pitch;
    int marks = 0;
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    CUDA(cudaMallocPitch(&device, &pitch, bytes, rows));
    for (int round = 0; round < 100; round++) {
        memset(host, round, sizeof host);
        memset(back, 255, sizeof back);
        CUDA(cudaLaunchHostFunc(s, mark, &marks));
        CUDA(cudaMemcpy2DAsync(device, pitch, host, bytes, bytes, rows, cudaMemcpyHostToDevice, s));
        CUDA(cudaLaunchHostFunc(s, mark, &marks));
        CUDA(cudaMemcpy2DAsync(back, bytes, device, pitch, bytes, rows, cudaMemcpyDeviceToHost, s));
        CUDA(cudaStreamSynchronize(s));
        REQUIRE(memcmp(host, back, sizeof host) == 0);
    }
    // The copy's node reads the host's memory when it runs.
    cudaGraph_t graph;
    cudaGraphNode_t function, copy;
    cudaGraphExec_t exec;
    cudaHostNodeParams params = {mark, &marks};
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphAddHostNode(&function, graph, nullptr, 0, &params));
    CUDA(cudaGraphAddMemcpyNode1D(&copy, graph, &function, 1, device, host, rows * bytes, cudaMemcpyHostToDevice));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    for (int round = 0; round < 20; round++) {
        memset(host, 100 + round, sizeof host);
        CUDA(cudaGraphLaunch(exec, s));
        CUDA(cudaStreamSynchronize(s));
        CUDA(cudaMemcpy(back, device, sizeof back, cudaMemcpyDeviceToHost));
        REQUIRE(memcmp(host, back, sizeof host) == 0);
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    REQUIRE(marks == 220);
    CUDA(cudaFree(device));
    OK("%d host functions", marks);
}
