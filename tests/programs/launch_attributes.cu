// cudaLaunchKernelEx: attributes, clusters of blocks where the device has them, stream priorities.
// build: -arch=sm_90
#include "check.h"
#include <cooperative_groups.h>
namespace cg = cooperative_groups;

__global__ void plain(int *p) { p[blockIdx.x] = gridDim.x; }

__global__ void clustered(int *p)
{
    __shared__ int mine;
    auto cluster = cg::this_cluster();
    mine = blockIdx.x * 10;
    cluster.sync();
    unsigned next = (cluster.block_rank() + 1) % cluster.num_blocks();
    int seen = *cluster.map_shared_rank(&mine, next);
    cluster.sync();
    p[blockIdx.x] = seen * 100 + cluster.num_blocks();
}

int main()
{
    Device<int> d(8);
    int least, greatest;
    CUDA(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    REQUIRE(greatest <= least);
    cudaStream_t s;
    CUDA(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, greatest));
    int priority;
    CUDA(cudaStreamGetPriority(s, &priority));
    REQUIRE(priority == greatest);
    cudaLaunchConfig_t config = {};
    config.gridDim = 8, config.blockDim = 1, config.stream = s;
    cudaLaunchAttribute attribute[2] = {};
    attribute[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attribute, config.numAttrs = 1;
    CUDA(cudaLaunchKernelEx(&config, plain, d.data));
    CUDA(cudaStreamSynchronize(s));
    for (int x : d.host()) REQUIRE(x == 8);

    attribute[0].id = cudaLaunchAttributeClusterDimension;
    attribute[0].val.clusterDim = {4, 1, 1};
    CUDA(cudaLaunchKernelEx(&config, clustered, d.data));
    CUDA(cudaStreamSynchronize(s));
    auto got = d.host();
    for (int b = 0; b < 8; b++) REQUIRE(got[b] == (b / 4 * 4 + (b + 1) % 4) * 10 * 100 + 4);

    // What steers the device and changes no result: of a launch, a stream, a function, a graph's
    // node.
    attribute[0].id = cudaLaunchAttributePriority;
    attribute[0].val.priority = greatest;
    attribute[1].id = cudaLaunchAttributeMemSyncDomain;
    attribute[1].val.memSyncDomain = cudaLaunchMemSyncDomainRemote;
    config.numAttrs = 2;
    CUDA(cudaFuncSetAttribute(plain, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
    cudaStreamAttrValue window = {}, got_window;
    window.accessPolicyWindow.base_ptr = d.data;
    window.accessPolicyWindow.num_bytes = 32;
    window.accessPolicyWindow.hitRatio = 1.0f;
    window.accessPolicyWindow.hitProp = cudaAccessPropertyStreaming;
    window.accessPolicyWindow.missProp = cudaAccessPropertyNormal;
    CUDA(cudaStreamSetAttribute(s, cudaStreamAttributeAccessPolicyWindow, &window));
    CUDA(cudaStreamGetAttribute(s, cudaStreamAttributeAccessPolicyWindow, &got_window));
    REQUIRE(got_window.accessPolicyWindow.base_ptr == d.data);
    CUDA(cudaMemsetAsync(d, 0, 32, s));
    CUDA(cudaLaunchKernelEx(&config, plain, d.data));
    CUDA(cudaStreamSynchronize(s));
    for (int x : d.host()) REQUIRE(x == 8);

    cudaGraph_t graph;
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    CUDA(cudaMemsetAsync(d, 0, 32, s));
    CUDA(cudaLaunchKernelEx(&config, plain, d.data));
    CUDA(cudaStreamEndCapture(s, &graph));
    cudaGraphNode_t nodes[2];
    size_t count = 2;
    CUDA(cudaGraphGetNodes(graph, nodes, &count));
    cudaGraphNodeType type;
    CUDA(cudaGraphNodeGetType(nodes[0], &type));
    cudaGraphNode_t kernel = nodes[type == cudaGraphNodeTypeKernel ? 0 : 1];
    cudaKernelNodeAttrValue value = {};
    CUDA(cudaGraphKernelNodeGetAttribute(kernel, cudaLaunchAttributePriority, &value));
    REQUIRE(value.priority == greatest);
    value.priority = least;
    CUDA(cudaGraphKernelNodeSetAttribute(kernel, cudaLaunchAttributePriority, &value));
    value.priority = 99;
    CUDA(cudaGraphKernelNodeGetAttribute(kernel, cudaLaunchAttributePriority, &value));
    REQUIRE(value.priority == least);
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphLaunch(exec, s));
    CUDA(cudaStreamSynchronize(s));
    for (int x : d.host()) REQUIRE(x == 8);
    OK("clusters of 4");
}
