// Green contexts by the driver API: a device's multiprocessors shared out, and a stream on each
// part. On a GPU under kedge they are not supported, which is said by the first call.
// build: {cuda}
#include "check.h"
#include <cuda.h>

__global__ void fill(int *p, int n, int value)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] = value + i;
}

int main()
{
    const int n = 10000;
    CUdevice device;
    CUcontext primary, current;
    DRIVER(cuInit(0));
    DRIVER(cuDeviceGet(&device, 0));
    DRIVER(cuDevicePrimaryCtxRetain(&primary, device));
    DRIVER(cuCtxSetCurrent(primary));

    CUdevResource all = {}, rest = {}, seen = {};
    CUresult first = cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM);
    if (first == CUDA_ERROR_NOT_SUPPORTED) OK("green contexts are not supported here");
    DRIVER(first);
    int count;
    DRIVER(cuDeviceGetAttribute(&count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device));
    REQUIRE(all.sm.smCount == (unsigned)count);

    // One group of about half; what is left makes the other part.
    CUdevResource half = {};
    unsigned groups = 1, possible = 0;
    unsigned least = count / 2 > 0 ? count / 2 : 1;
    REQUIRE(cuDevSmResourceSplitByCount(&half, &groups, &all, &rest, 0, 100000) != CUDA_SUCCESS);
    groups = 1;
    DRIVER(cuDevSmResourceSplitByCount(nullptr, &possible, &all, nullptr, 0, least));
    REQUIRE(possible >= 1);
    DRIVER(cuDevSmResourceSplitByCount(&half, &groups, &all, &rest, 0, least));
    REQUIRE(groups == 1 && half.sm.smCount >= least && half.sm.smCount + rest.sm.smCount == all.sm.smCount);

    CUdevResource parts[2] = { half, rest };
    int used = rest.sm.smCount > 0 ? 2 : 1;
    CUgreenCtx green[2];
    CUstream stream[2];
    std::vector<Device<int> *> data;
    for (int i = 0; i < used; i++) {
        CUdevResourceDesc desc;
        DRIVER(cuDevResourceGenerateDesc(&desc, &parts[i], 1));
        DRIVER(cuGreenCtxCreate(&green[i], desc, device, CU_GREEN_CTX_DEFAULT_STREAM));
        DRIVER(cuGreenCtxGetDevResource(green[i], &seen, CU_DEV_RESOURCE_TYPE_SM));
        REQUIRE(seen.sm.smCount == parts[i].sm.smCount);
        DRIVER(cuGreenCtxStreamCreate(&stream[i], green[i], CU_STREAM_NON_BLOCKING, 0));
        CUgreenCtx owner = nullptr;
        DRIVER(cuStreamGetGreenCtx(stream[i], &owner));
        REQUIRE(owner == green[i]);
        data.push_back(new Device<int>(n));
    }
    CUcontext sibling = nullptr;
    CUstream plain;
    CUgreenCtx none = green[0];
    DRIVER(cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING));
    DRIVER(cuStreamGetGreenCtx(plain, &none));
    REQUIRE(none == nullptr);
    DRIVER(cuStreamDestroy(plain));
    for (int i = 0; i < used; i++) {
        // Another context than the primary one and than its sibling, with the part's
        // multiprocessors.
        DRIVER(cuCtxFromGreenCtx(&current, green[i]));
        REQUIRE(current != primary && current != sibling);
        sibling = current;
        unsigned long long own, other;
        DRIVER(cuCtxGetId(current, &own));
        DRIVER(cuCtxGetId(primary, &other));
        REQUIRE(own != other);
        DRIVER(cuCtxGetDevResource(current, &seen, CU_DEV_RESOURCE_TYPE_SM));
        REQUIRE(seen.sm.smCount == parts[i].sm.smCount);
        DRIVER(cuCtxPushCurrent(current));
        CUcontext now;
        DRIVER(cuCtxGetCurrent(&now));
        REQUIRE(now == current);
        DRIVER(cuStreamGetCtx(stream[i], &now));
        REQUIRE(now == current);
        // What is allocated and loaded here is usable in the primary context, and the other way
        // round.
        int *here;
        CUDA(cudaMalloc(&here, sizeof(int)));
        fill<<<1, 1, 0, stream[i]>>>(here, 1, 7);
        CUDA(cudaFree(here));
        fill<<<8, 128, 0, stream[i]>>>(*data[i], n, 1000 * i);
        CUDA(cudaGetLastError());
        DRIVER(cuStreamSynchronize(stream[i]));
        DRIVER(cuCtxPopCurrent(&current));
    }
    for (int i = 0; i < used; i++) {
        auto got = data[i]->host();
        for (int k = 0; k < n; k++) REQUIRE(got[k] == 1000 * i + k);
        delete data[i];
        DRIVER(cuStreamDestroy(stream[i]));
        DRIVER(cuGreenCtxDestroy(green[i]));
    }
    DRIVER(cuDevicePrimaryCtxRelease(device));
    OK("parts of the multiprocessors: %d", used);
}
