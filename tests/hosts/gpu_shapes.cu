// Counts steps in everything but plain memory: an array that is read by a texture object and
// written by a surface object, a layered one, a variable, a constant, managed memory, and physical
// memory of the program's own at an address of its own. Compared with what the host computes.
// Prints as gpu_steps does. Usage: gpu_shapes STEPS MILLISECONDS
#include "steps.h"
#include <cuda.h>

constexpr int SIDE = 64, LAYERS = 3, N = SIDE * SIDE;

__device__ uint32_t variable = 5;
__constant__ uint32_t constant[2];
__managed__ uint32_t managed[256];

__host__ __device__ static uint32_t mix(uint32_t a, uint32_t b) { return (a ^ b * 2654435761u) * 31 + (b >> 7) + 1; }


__global__ void step(cudaTextureObject_t read, cudaSurfaceObject_t write, cudaSurfaceObject_t layers, uint32_t *own, uint32_t *sum, uint32_t number)
{
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y, i = y * SIDE + x;
    uint32_t old = tex2D<uint32_t>(read, x, y), layer;
    surf2DLayeredread(&layer, layers, x * 4, y, number % LAYERS);
    uint32_t now = mix(old ^ layer, own[i] + managed[i % 256] + variable + constant[i % 2] + number);
    surf2Dwrite(now, write, x * 4, y);
    surf2DLayeredwrite(now + old, layers, x * 4, y, number % LAYERS);
    own[i] = now ^ number;
    atomicXor(sum, mix(now, i));
}

// Between two steps, when nobody reads it.
__global__ void change() { variable = variable * 1664525u + 1013904223u; }

static cudaArray_t array(int layers, cudaSurfaceObject_t &surface)
{
    cudaArray_t made;
    cudaChannelFormatDesc word = cudaCreateChannelDesc<uint32_t>();
    unsigned flags = cudaArraySurfaceLoadStore | (layers ? cudaArrayLayered : 0);
    CUDA(cudaMalloc3DArray(&made, &word, make_cudaExtent(SIDE, SIDE, layers), flags));
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = made;
    CUDA(cudaCreateSurfaceObject(&surface, &resource));
    cudaMemcpy3DParms copy = {};
    std::vector<uint32_t> zeros(N * (layers ? layers : 1));
    copy.srcPtr = make_cudaPitchedPtr(zeros.data(), SIDE * 4, SIDE, SIDE);
    copy.dstArray = made, copy.extent = make_cudaExtent(SIDE, SIDE, layers ? layers : 1);
    copy.kind = cudaMemcpyHostToDevice;
    CUDA(cudaMemcpy3D(&copy));
    return made;
}

static cudaTextureObject_t texture(cudaArray_t of)
{
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = of;
    cudaTextureDesc desc = {};
    desc.readMode = cudaReadModeElementType;
    cudaTextureObject_t made;
    CUDA(cudaCreateTextureObject(&made, &resource, &desc, nullptr));
    return made;
}

static uint32_t *own_memory()
{
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    size_t size;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    DRIVER(cuMemGetAllocationGranularity(&size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    DRIVER(cuMemCreate(&handle, size, &prop, 0));
    DRIVER(cuMemAddressReserve(&address, size, 0, 0, 0));
    DRIVER(cuMemMap(address, size, 0, handle, 0));
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER(cuMemSetAccess(address, size, &access, 1));
    CUDA(cudaMemset((void *)address, 0, size));
    return (uint32_t *)address;
}

// The same, computed here.
struct Host {
    std::vector<uint32_t> image = std::vector<uint32_t>(N), own = image, layers[LAYERS] = {image, image, image};
    uint32_t variable = 5, constant[2] = {7, 11};

    uint32_t step(uint32_t number)
    {
        uint32_t sum = 0;
        std::vector<uint32_t> &layer = layers[number % LAYERS];
        for (int i = 0; i < N; i++) {
            uint32_t old = image[i];
            uint32_t now = mix(old ^ layer[i], own[i] + managed[i % 256] + variable + constant[i % 2] + number);
            image[i] = now, layer[i] = now + old, own[i] = now ^ number;
            sum ^= mix(now, i);
        }
        variable = variable * 1664525u + 1013904223u;
        return sum;
    }
};

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    CUDA(cudaFree(nullptr));
    Host host;
    uint32_t *sum, seen, *own = own_memory();
    cudaSurfaceObject_t surface, layered;
    cudaTextureObject_t read = texture(array(0, surface));
    array(LAYERS, layered);
    CUDA(cudaMalloc(&sum, sizeof *sum));
    CUDA(cudaMemcpyToSymbol(constant, host.constant, sizeof host.constant));
    for (int i = 0; i < 256; i++) managed[i] = i * i;
    dim3 block(16, 16), grid(SIDE / 16, SIDE / 16);
    for (uint32_t number = 1; number <= steps.count; number++) {
        CUDA(cudaMemset(sum, 0, sizeof *sum));
        step<<<grid, block>>>(read, surface, layered, own, sum, number);
        change<<<1, 1>>>();
        CUDA(cudaMemcpy(&seen, sum, sizeof seen, cudaMemcpyDeviceToHost));
        CUDA(cudaDeviceSynchronize());
        if (seen != host.step(number)) {
            std::printf("%08x: step %u is wrong\n", steps.nonce, number);
            return 1;
        }
        managed[number % 256] += number;
        steps.done(number);
        steps.rest();
    }
    return steps.well();
}
