// A graph built by hand: kernel, memset, memcpy, host, empty and child nodes; parameters changed.
#include "check.h"

__global__ void axpy(float a, const float *x, float *y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}

static void CUDART_CB bump(void *p) { ++*(int *)p; }

int main()
{
    int n = 2000;
    std::vector<float> hx(n), hy(n, -1);
    for (int i = 0; i < n; i++) hx[i] = float(i);
    Device<float> x(n), y(n);
    cudaGraph_t graph, child;
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphCreate(&child, 0));
    cudaGraphNode_t up, clear, inner, kernel, down, host, nothing;
    CUDA(cudaGraphAddMemcpyNode1D(&up, graph, nullptr, 0, x, hx.data(), n * 4, cudaMemcpyHostToDevice));
    cudaMemsetParams zero = {};
    zero.dst = y.data, zero.elementSize = 4, zero.width = n, zero.height = 1;
    CUDA(cudaGraphAddMemsetNode(&clear, child, nullptr, 0, &zero));
    CUDA(cudaGraphAddChildGraphNode(&inner, graph, nullptr, 0, child));
    cudaGraphNode_t both[] = {up, inner};
    CUDA(cudaGraphAddEmptyNode(&nothing, graph, both, 2));
    float a = 2;
    float *px = x, *py = y;
    void *args[] = {&a, &px, &py, &n};
    cudaKernelNodeParams launch = {};
    launch.func = (void *)axpy, launch.gridDim = dim3((n + 255) / 256), launch.blockDim = dim3(256);
    launch.kernelParams = args;
    CUDA(cudaGraphAddKernelNode(&kernel, graph, &nothing, 1, &launch));
    CUDA(cudaGraphAddMemcpyNode1D(&down, graph, &kernel, 1, hy.data(), y, n * 4, cudaMemcpyDeviceToHost));
    int count = 0;
    cudaHostNodeParams fn = {bump, &count};
    CUDA(cudaGraphAddHostNode(&host, graph, &down, 1, &fn));
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(kernel, &type));
    REQUIRE(type == cudaGraphNodeTypeKernel);

    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, nullptr, nullptr, 0));
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    for (int round = 0; round < 3; round++) {
        CUDA(cudaGraphLaunch(exec, s));
        CUDA(cudaStreamSynchronize(s));
        REQUIRE(count == round + 1);
        for (int i = 0; i < n; i++) REQUIRE(hy[i] == a * i);
        a += 1.5f;
        CUDA(cudaGraphExecKernelNodeSetParams(exec, kernel, &launch));
    }
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(child));
    CUDA(cudaGraphDestroy(graph));
    OK("three launches");
}
