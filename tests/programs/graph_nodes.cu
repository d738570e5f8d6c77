// Every kind of graph node asked about, changed, disabled, updated and copied.
#include "check.h"
#include <chrono>
#include <thread>

const int N = 1000;

__global__ void add(int *p, int n, int by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] += by;
}

__global__ void scale(int *p, int n, int by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] *= by;
}

static int counted = 0;
static void CUDART_CB count(void *by) { counted += *(int *)by; }
static int destroyed = 0;
static void CUDART_CB destroy(void *) { destroyed++; }

struct Kernel {
    int *p;
    int n = N, by;
    void *args[3] = {&p, &n, &by};
    cudaKernelNodeParams params = {};
    Kernel(void (*f)(int *, int, int), int *p_, int by_) : p(p_), by(by_)
    {
        params.func = (void *)f;
        params.gridDim = dim3(4);
        params.blockDim = dim3(256);
        params.kernelParams = args;
    }
};

static void run(cudaGraphExec_t exec, cudaStream_t stream)
{
    CUDA(cudaGraphLaunch(exec, stream));
    CUDA(cudaStreamSynchronize(stream));
}

int main()
{
    Device<int> data(N);
    std::vector<int> in(N, 3), out(N, 0);
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));

    // in -> data, + 2, * 10 -> out, count, clear.
    cudaGraph_t graph;
    cudaGraphNode_t load, plus, times, store, host, empty, clear;
    CUDA(cudaGraphCreate(&graph, 0));
    CUDA(cudaGraphAddMemcpyNode1D(&load, graph, nullptr, 0, data, in.data(), N * 4, cudaMemcpyHostToDevice));
    Kernel first(add, data, 2), second(scale, data, 10);
    CUDA(cudaGraphAddKernelNode(&plus, graph, &load, 1, &first.params));
    CUDA(cudaGraphAddKernelNode(&times, graph, &plus, 1, &second.params));
    CUDA(cudaGraphAddMemcpyNode1D(&store, graph, &times, 1, out.data(), data, N * 4, cudaMemcpyDeviceToHost));
    int five = 5, thousand = 1000;
    cudaHostNodeParams call = {count, &five};
    CUDA(cudaGraphAddHostNode(&host, graph, &store, 1, &call));
    CUDA(cudaGraphAddEmptyNode(&empty, graph, &host, 1));
    cudaMemsetParams zero = {};
    zero.dst = data;
    zero.elementSize = 4;
    zero.width = N;
    zero.height = 1;
    CUDA(cudaGraphAddMemsetNode(&clear, graph, &empty, 1, &zero));
    cudaUserObject_t object;
    CUDA(cudaUserObjectCreate(&object, &five, destroy, 1, cudaUserObjectNoDestructorSync));
    CUDA(cudaGraphRetainUserObject(graph, object, 1, cudaGraphUserObjectMove));

    // Host memory is read when the graph runs, not when the node is made.
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    run(exec, stream);
    REQUIRE(out[7] == 50 && counted == 5 && data.host()[7] == 0);
    in.assign(N, 4);
    run(exec, stream);
    REQUIRE(out[N - 1] == 60 && counted == 10);

    // What nodes tell.
    cudaKernelNodeParams told = {};
    CUDA(cudaGraphKernelNodeGetParams(plus, &told));
    REQUIRE(told.func == (void *)add && told.gridDim.x == 4 && *(int *)told.kernelParams[2] == 2);
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(clear, &type));
    REQUIRE(type == cudaGraphNodeTypeMemset);
    size_t nodes = 0, roots = 0;
    CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
    CUDA(cudaGraphGetRootNodes(graph, nullptr, &roots));
    REQUIRE(nodes == 7 && roots == 1);

    // One node of the executable changed, disabled, enabled.
    Kernel more(add, data, 100);
    CUDA(cudaGraphExecKernelNodeSetParams(exec, plus, &more.params));
    run(exec, stream);
    REQUIRE(out[7] == 1040);
    unsigned enabled = 9;
    CUDA(cudaGraphNodeSetEnabled(exec, times, 0));
    CUDA(cudaGraphNodeGetEnabled(exec, times, &enabled));
    run(exec, stream);
    REQUIRE(enabled == 0 && out[7] == 104);
    CUDA(cudaGraphNodeSetEnabled(exec, times, 1));
    run(exec, stream);
    REQUIRE(out[7] == 1040);

    // The graph changed, then the executable updated from it.
    Kernel one(add, data, 1);
    CUDA(cudaGraphKernelNodeSetParams(plus, &one.params));
    call.userData = &thousand;
    CUDA(cudaGraphHostNodeSetParams(host, &call));
    cudaGraphExecUpdateResultInfo info;
    CUDA(cudaGraphExecUpdate(exec, graph, &info));
    counted = 0;
    run(exec, stream);
    REQUIRE(info.result == cudaGraphExecUpdateSuccess && out[7] == 50 && counted == 1000);

    // A clone as a child of another graph.
    cudaGraph_t clone, parent, inside;
    cudaGraphNode_t same, child, after;
    CUDA(cudaGraphClone(&clone, graph));
    CUDA(cudaGraphNodeFindInClone(&same, plus, clone));
    REQUIRE(same != plus);
    CUDA(cudaGraphCreate(&parent, 0));
    CUDA(cudaGraphAddChildGraphNode(&child, parent, nullptr, 0, clone));
    int last = 77;
    CUDA(cudaGraphAddMemcpyNode1D(&after, parent, &child, 1, &last, data, 4, cudaMemcpyDeviceToHost));
    CUDA(cudaGraphChildGraphNodeGetGraph(child, &inside));
    REQUIRE(inside != clone);
    cudaGraphExec_t nested;
    CUDA(cudaGraphInstantiate(&nested, parent, 0));
    out[7] = 0;
    run(nested, stream);
    REQUIRE(out[7] == 50 && last == 0);
    EXPECT(cudaErrorGraphExecUpdateFailure, cudaGraphExecUpdate(nested, graph, &info));
    REQUIRE(info.result == cudaGraphExecUpdateErrorTopologyChanged);

    // Events recorded by a graph.
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    cudaGraph_t timed;
    cudaGraphNode_t start, work, stop;
    CUDA(cudaGraphCreate(&timed, 0));
    CUDA(cudaGraphAddEventRecordNode(&start, timed, nullptr, 0, begin));
    CUDA(cudaGraphAddKernelNode(&work, timed, &start, 1, &one.params));
    CUDA(cudaGraphAddEventRecordNode(&stop, timed, &work, 1, end));
    cudaGraphExec_t clocked;
    CUDA(cudaGraphInstantiate(&clocked, timed, 0));
    CUDA(cudaGraphLaunch(clocked, stream));
    CUDA(cudaEventSynchronize(end));
    float ms = -1;
    CUDA(cudaEventElapsedTime(&ms, begin, end));
    REQUIRE(ms >= 0);

    // The user object lives as long as anything that was made of its graph.
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(clone));
    CUDA(cudaGraphDestroy(parent));
    CUDA(cudaDeviceSynchronize());
    REQUIRE(destroyed == 0);
    CUDA(cudaGraphExecDestroy(nested));
    // CUDA says not when: a thread of its own may do it.
    for (int ms = 0; ms < 5000 && destroyed == 0; ms++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        CUDA(cudaDeviceSynchronize());
    }
    REQUIRE(destroyed == 1);
    OK("seven kinds of nodes");
}
