// Small questions, answered as drivers answer them: limits, missing handles, allocations of no
// bytes, advice, occupancy, tensor maps.
// build: {cuda}
#include "check.h"
#include <cuda.h>

extern __shared__ int dynamic[];
__global__ void plain(int *p) { *p = 1; }
__global__ void fixed_shared(int *p)
{
    __shared__ int own[1024];
    own[threadIdx.x] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = own[threadIdx.x ^ 1] + dynamic[0];
}

static CUfunction function(const void *kernel)
{
    cudaFunction_t function;
    CUDA(cudaGetFuncBySymbol(&function, kernel));
    return function;
}

static void limits()
{
    int major;
    DRIVER(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    size_t value;
    for (int limit = CU_LIMIT_STACK_SIZE; limit <= CU_LIMIT_PERSISTING_L2_CACHE_SIZE; limit++)
        // cuda.h: "only applicable to devices of compute capability < 9.0"
        if (limit != CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH || major < 9) DRIVER(cuCtxGetLimit(&value, (CUlimit)limit));
    // What cuBLASLt asks of every context (none runs beside graphics here): asked for, and not set.
    DRIVER(cuCtxGetLimit(&value, (CUlimit)8));
    REQUIRE(value == 0);
    DRIVER(cuCtxGetLimit(&value, (CUlimit)7));
    int optin;
    DRIVER(cuDeviceGetAttribute(&optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0));
    REQUIRE(value == (size_t)optin);
    for (int limit : {7, 8}) REQUIRE(cuCtxSetLimit((CUlimit)limit, value) == CUDA_ERROR_NOT_PERMITTED);
    REQUIRE(cuCtxGetLimit(&value, (CUlimit)9) == CUDA_ERROR_UNSUPPORTED_LIMIT);
    REQUIRE(cuCtxSetLimit((CUlimit)9, 1) == CUDA_ERROR_UNSUPPORTED_LIMIT);
    for (int limit : {10, 1000}) {
        REQUIRE(cuCtxGetLimit(&value, (CUlimit)limit) == CUDA_ERROR_INVALID_VALUE);
        REQUIRE(cuCtxSetLimit((CUlimit)limit, 1) == CUDA_ERROR_INVALID_VALUE);
    }
    DRIVER(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    DRIVER(cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    REQUIRE(value >= 4096);
    if (major >= 9) {
        REQUIRE(cuCtxGetLimit(&value, CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH) == CUDA_ERROR_UNSUPPORTED_LIMIT);
        REQUIRE(cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 4) == CUDA_ERROR_UNSUPPORTED_LIMIT);
    }
}

static void missing_handles(CUfunction known)
{
    const char *name = nullptr;
    REQUIRE(cuKernelGetName(&name, nullptr) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(cuFuncGetName(&name, nullptr) == CUDA_ERROR_INVALID_VALUE);
    REQUIRE(cuFuncGetName(nullptr, known) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuFuncGetName(&name, known));
    REQUIRE(name != nullptr);
}

static void no_bytes()
{
    CUstream stream;
    CUmemoryPool pool;
    DRIVER(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    DRIVER(cuDeviceGetDefaultMemPool(&pool, 0));
    CUdeviceptr none = 7;
    DRIVER(cuMemAllocAsync(&none, 0, stream));
    REQUIRE(none == 0);
    DRIVER(cuMemFreeAsync(none, stream));
    none = 7;
    DRIVER(cuMemAllocFromPoolAsync(&none, 0, pool, stream));
    REQUIRE(none == 0);
    REQUIRE(cuMemAlloc(&none, 0) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(cuStreamDestroy(stream));
}

static void advice()
{
    int concurrent;
    DRIVER(cuDeviceGetAttribute(&concurrent, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 0));
    if (!concurrent) return;
    CUdeviceptr managed;
    DRIVER(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
    CUDA(cudaMemAdvise((void *)managed, 4096, cudaMemAdviseSetAccessedBy, {cudaMemLocationTypeHost, 0}));
    CUDA(cudaMemAdvise((void *)managed, 4096, cudaMemAdviseSetAccessedBy, {cudaMemLocationTypeDevice, 0}));
    int by[3];
    DRIVER(cuMemRangeGetAttribute(by, sizeof by, CU_MEM_RANGE_ATTRIBUTE_ACCESSED_BY, managed, 4096));
    REQUIRE(by[0] == 0 && by[1] == CU_DEVICE_CPU && by[2] == CU_DEVICE_INVALID);
    DRIVER(cuMemFree(managed));

    // What holds for a part of a range does not hold for all of it.
    const size_t part = 2 << 20;
    DRIVER(cuMemAllocManaged(&managed, 2 * part, CU_MEM_ATTACH_GLOBAL));
    CUDA(cudaMemAdvise((void *)managed, part, cudaMemAdviseSetPreferredLocation, {cudaMemLocationTypeDevice, 0}));
    auto preferred = [](CUdeviceptr at, size_t bytes) {
        int where;
        DRIVER(cuMemRangeGetAttribute(&where, sizeof where, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, at, bytes));
        return where;
    };
    REQUIRE(preferred(managed, part) == 0);
    REQUIRE(preferred(managed + part, part) == CU_DEVICE_INVALID);
    REQUIRE(preferred(managed, 2 * part) == CU_DEVICE_INVALID);
    DRIVER(cuMemFree(managed));
}

static void occupancy(CUfunction plain, CUfunction fixed_shared)
{
    // Without the opt-in a block has 48 KiB, however few blocks there are.
    size_t available;
    DRIVER(cuOccupancyAvailableDynamicSMemPerBlock(&available, plain, 1, 32));
    REQUIRE(available == 48 << 10);
    DRIVER(cuOccupancyAvailableDynamicSMemPerBlock(&available, fixed_shared, 1, 32));
    REQUIRE(available == 44 << 10);
    int optin, dynamic;
    DRIVER(cuDeviceGetAttribute(&optin, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 0));
    DRIVER(cuFuncSetAttribute(plain, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, optin));
    DRIVER(cuFuncGetAttribute(&dynamic, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, plain));
    REQUIRE(dynamic == optin);
    DRIVER(cuOccupancyAvailableDynamicSMemPerBlock(&available, plain, 1, 32));
    REQUIRE(available > 48 << 10 && available <= (size_t)optin);
}

// A map may be written anywhere in host memory: bindings of other languages do not align it.
static void tensor_map()
{
    int major;
    DRIVER(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    if (major < 9) return;
    Device<float> data(64 * 64);
    alignas(64) static char room[256];
    cuuint64_t extent[2] = {64, 64}, strides[1] = {256};
    cuuint32_t box[2] = {32, 32}, steps[2] = {1, 1};
    for (int offset : {0, 16})
        DRIVER(cuTensorMapEncodeTiled((CUtensorMap *)(room + offset), CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, (float *)data,
                                      extent, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
}

int main()
{
    CUDA(cudaFree(nullptr));
    CUfunction f = function((void *)plain), s = function((void *)fixed_shared);
    limits();
    missing_handles(f);
    no_bytes();
    advice();
    occupancy(f, s);
    tensor_map();
    OK("answers as drivers give them");
}
