// Counts steps by a graph whose node does nothing in every other one, beside an array that was made
// after the graph and is filled once: the device looks at all of it in each step. Between steps a
// mipmapped array is made, and ended. Prints as gpu_steps does. Usage: gpu_arrays STEPS
// MILLISECONDS [modules]     modules: each step loads another one
#include "steps.h"
#include <cuda.h>
#include <vector>

constexpr int SIDE = 64, N = SIDE * SIDE;

__device__ uint32_t counter;

__global__ void count() { counter++; }

__host__ __device__ static uint32_t texel(uint32_t i) { return i * 2654435761u + 1; }

__global__ void look(cudaTextureObject_t image, uint32_t *wrong)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (tex2D<uint32_t>(image, x, y) != texel(y * SIDE + x)) atomicAdd(wrong, 1);
}

static cudaTextureObject_t filled()
{
    cudaArray_t array;
    cudaChannelFormatDesc word = cudaCreateChannelDesc<uint32_t>();
    CUDA(cudaMallocArray(&array, &word, SIDE, SIDE));
    std::vector<uint32_t> texels(N);
    for (uint32_t i = 0; i < N; i++) texels[i] = texel(i);
    CUDA(cudaMemcpy2DToArray(array, 0, 0, texels.data(), SIDE * 4, SIDE * 4, SIDE, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    cudaTextureDesc desc = {};
    desc.readMode = cudaReadModeElementType;
    cudaTextureObject_t made;
    CUDA(cudaCreateTextureObject(&made, &resource, &desc, nullptr));
    return made;
}

static const char *MODULE = ".version 7.0 .target sm_50 .address_size 64 .visible .entry nothing() { ret; }";

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    CUmodule module = nullptr;
    uint32_t *wrong;
    CUDA(cudaMalloc(&wrong, sizeof *wrong));
    CUDA(cudaMemset(wrong, 0, sizeof *wrong));
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaGraphNode_t node;
    size_t nodes = 1;
    CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    count<<<1, 1, 0, stream>>>();
    CUDA(cudaStreamEndCapture(stream, &graph));
    CUDA(cudaGraphGetNodes(graph, &node, &nodes));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    cudaTextureObject_t image = filled();
    cudaMipmappedArray_t levels = nullptr;
    uint32_t counted = 0;
    for (uint32_t number = 1; number <= steps.count; number++) {
        CUDA(cudaGraphNodeSetEnabled(exec, node, number % 2));
        CUDA(cudaGraphLaunch(exec, stream));
        look<<<dim3(SIDE / 16, SIDE / 16), dim3(16, 16), 0, stream>>>(image, wrong);
        CUDA(cudaStreamSynchronize(stream));
        counted += number % 2;
        uint32_t found[2];
        CUDA(cudaMemcpyFromSymbol(&found[0], counter, sizeof found[0]));
        CUDA(cudaMemcpy(&found[1], wrong, sizeof found[1], cudaMemcpyDeviceToHost));
        if (found[0] != counted || found[1]) {
            std::printf("%08x: step %u is wrong: %u counted instead of %u, %u texels\n", steps.nonce, number, found[0],
                        counted, found[1]);
            return 1;
        }
        cudaChannelFormatDesc word = cudaCreateChannelDesc<uint32_t>();
        if (number % 3 == 0) CUDA(cudaMallocMipmappedArray(&levels, &word, make_cudaExtent(SIDE, SIDE, 0), 3));
        if (number % 3 == 1 && levels) CUDA(cudaFreeMipmappedArray(levels));
        if (argc > 3) {
            if (module) DRIVER(cuModuleUnload(module));
            DRIVER(cuModuleLoadData(&module, MODULE));
        }
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
