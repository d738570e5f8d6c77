// A captured graph with a fork and a join, launched again and again, updated, cloned.
#include "check.h"

__global__ void scale(float *p, float by, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] *= by;
}

__global__ void add(float *p, const float *q, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += q[i];
}

static int calls = 0;
static void CUDART_CB counted(void *) { calls++; }

int main()
{
    const int n = 3000, blocks = (n + 127) / 128;
    std::vector<float> ones(n, 1.0f);
    Device<float> a(ones), b(ones);
    float *out;
    CUDA(cudaMallocHost(&out, n * 4));
    cudaStream_t s, t;
    CUDA(cudaStreamCreate(&s));
    CUDA(cudaStreamCreate(&t));
    cudaEvent_t fork, join;
    CUDA(cudaEventCreate(&fork));
    CUDA(cudaEventCreate(&join));

    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    scale<<<blocks, 128, 0, s>>>(a, 2.0f, n);
    CUDA(cudaEventRecord(fork, s));
    CUDA(cudaStreamWaitEvent(t, fork, 0));
    scale<<<blocks, 128, 0, t>>>(b, 3.0f, n);
    CUDA(cudaEventRecord(join, t));
    CUDA(cudaStreamWaitEvent(s, join, 0));
    add<<<blocks, 128, 0, s>>>(a, b, n);
    CUDA(cudaMemcpyAsync(out, a, n * 4, cudaMemcpyDeviceToHost, s));
    CUDA(cudaLaunchHostFunc(s, counted, nullptr));
    cudaStreamCaptureStatus status;
    CUDA(cudaStreamIsCapturing(t, &status));
    REQUIRE(status == cudaStreamCaptureStatusActive);
    cudaGraph_t graph, copy;
    CUDA(cudaStreamEndCapture(s, &graph));
    size_t nodes, edges;
    CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
    REQUIRE(nodes == 5);
    REQUIRE(a.host()[0] == 1.0f); // nothing ran

    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    float x = 1, y = 1;
    for (int i = 0; i < 5; i++) {
        CUDA(cudaGraphLaunch(exec, s));
        x *= 2, y *= 3, x += y;
    }
    CUDA(cudaStreamSynchronize(s));
    for (int i = 0; i < n; i++) REQUIRE(out[i] == x);
    REQUIRE(calls == 5);

    CUDA(cudaGraphClone(&copy, graph));
    CUDA(cudaGraphGetRootNodes(copy, nullptr, &nodes));
    REQUIRE(nodes == 1);
#if CUDART_VERSION >= 13000
    CUDA(cudaGraphGetEdges(copy, nullptr, nullptr, nullptr, &edges));
#else
    CUDA(cudaGraphGetEdges(copy, nullptr, nullptr, &edges));
#endif
    REQUIRE(edges == 5);
    CUDA(cudaGraphDestroy(copy));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaFreeHost(out));
    OK("five launches of five nodes");
}
