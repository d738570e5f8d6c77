// What kernels ask of the device runtime: streams ordered by events, copies and fills of boxes,
// errors, and facts about the device and its kernels.
// build: -rdc=true -lcudadevrt
#include "check.h"
#include <cstring>

__global__ void add(int *p, int from, int value) { int i = threadIdx.x; p[i] = p[from + i] + value; }

// A long chain over two streams: each link reads what the other stream's last one left.
__global__ void chain(int *p, int links, int *told)
{
    cudaStream_t stream[2];
    cudaEvent_t event[2];
    int bad = 0;
    for (int i = 0; i < 2; i++) {
        bad |= cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking);
        bad |= cudaEventCreateWithFlags(&event[i], cudaEventDisableTiming);
    }
    // Nobody has recorded it: no wait.
    bad |= cudaStreamWaitEvent(stream[0], event[1], 0);
    for (int i = 0; i < links; i++) {
        int own = i & 1;
        if (i > 0) bad |= cudaStreamWaitEvent(stream[own], event[!own], 0);
        add<<<1, 32, 0, stream[own]>>>(p + 32 * own, own ? -32 : i ? 32 : 0, 1);
        bad |= cudaGetLastError();
        bad |= cudaEventRecord(event[own], stream[own]);
    }
    for (int i = 0; i < 2; i++) bad |= cudaEventDestroy(event[i]) | cudaStreamDestroy(stream[i]);
    told[0] = bad;
}

// Fills and copies are asked for by two grids: natively, work behind a fill was seen not to wait
// for it. `mark`: there (driver 580) fills were seen to write 0 whatever their value.
__global__ void boxes(unsigned char *p, int *told, bool copy, int mark)
{
    cudaPitchedPtr to = { p + 64, 16, 16, 4 };
    cudaExtent extent = { 4, 2, 2 };
    if (!copy) {
        told[0] = cudaMemset2DAsync(p, 16, mark, 8, 4, 0);
        told[1] = cudaMemset3DAsync(to, 2 * mark, extent, 0);
        return;
    }
    told[2] = cudaMemcpy2DAsync(p + 256, 32, p, 16, 8, 4, cudaMemcpyDeviceToDevice, 0);
    cudaMemcpy3DParms parms = {};
    parms.srcPtr = to;
    parms.dstPtr = { p + 512, 8, 8, 2 };
    parms.extent = extent;
    parms.kind = cudaMemcpyDeviceToDevice;
    told[3] = cudaMemcpy3DAsync(&parms, 0);
}

__global__ void facts(int *out)
{
    cudaFuncAttributes attributes;
    size_t limit = 0;
    int n = 0;
    out[n++] = cudaGetDevice(&out[8]);
    out[n++] = cudaDeviceGetAttribute(&out[9], cudaDevAttrMaxThreadsPerBlock, 0);
    out[n++] = cudaDeviceGetLimit(&limit, cudaLimitMallocHeapSize);
    out[n++] = cudaFuncGetAttributes(&attributes, add);
    out[n++] = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&out[10], add, 256, 0);
    out[11] = attributes.maxThreadsPerBlock;
    out[12] = limit > 0;
    // A launch that cannot be: said once, to the thread that asked.
    if (threadIdx.x == 1) add<<<1, 4096>>>(out, 0, 1);
    int peeked = cudaPeekAtLastError(), got = cudaGetLastError(), then = cudaGetLastError();
    if (threadIdx.x == 1) {
        out[13] = peeked;
        out[14] = got;
        out[15] = then;
    } else {
        out[16] = peeked | got;
    }
}

static int run_chain()
{
    const int links = 101;
    Device<int> p(64), told(1);
    CUDA(cudaMemset(p, 0, 64 * sizeof(int)));
    CUDA(cudaMemset(told, 0xff, sizeof(int)));
    chain<<<1, 1>>>(p, links, told);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(told.host()[0] == 0);
    auto got = p.host();
    for (int i = 0; i < 64; i++) REQUIRE(got[i] == links - i / 32);
    return links;
}

static void run_boxes()
{
    cudaDeviceProp props;
    CUDA(cudaGetDeviceProperties(&props, 0));
    const int mark = strstr(props.name, "software") ? 0x22 : 0;
    Device<unsigned char> p(1024);
    Device<int> told(4);
    CUDA(cudaMemset(p, 1, 1024));
    CUDA(cudaMemset(told, 0xff, 4 * sizeof(int)));
    for (bool copy : { false, true }) {
        boxes<<<1, 1>>>(p, told, copy, mark);
        CUDA(cudaDeviceSynchronize());
    }
    auto calls = told.host();
    for (int i = 0; i < 4; i++) {
        if (calls[i] != cudaSuccess) printf("call %d: %s\n", i, cudaGetErrorName((cudaError_t)calls[i]));
        REQUIRE(calls[i] == cudaSuccess);
    }
    std::vector<unsigned char> want(1024, 1);
    for (int y = 0; y < 4; y++)
        for (int x = 0; x < 8; x++) want[16 * y + x] = want[256 + 32 * y + x] = mark;
    for (int z = 0; z < 2; z++)
        for (int y = 0; y < 2; y++)
            for (int x = 0; x < 4; x++) want[64 + 64 * z + 16 * y + x] = want[512 + 16 * z + 8 * y + x] = 2 * mark;
    auto got = p.host();
    for (int i = 0; i < 1024; i++) {
        if (got[i] != want[i]) printf("byte %d: %x, not %x\n", i, got[i], want[i]);
        REQUIRE(got[i] == want[i]);
    }
}

int main()
{
    int links = run_chain();
    run_boxes();
    Device<int> out(17);
    CUDA(cudaMemset(out, 0xff, 17 * sizeof(int)));
    facts<<<1, 2>>>(out);
    CUDA(cudaDeviceSynchronize());
    auto f = out.host();
    for (int i = 0; i < 5; i++) REQUIRE(f[i] == cudaSuccess);
    cudaFuncAttributes attributes;
    int blocks;
    CUDA(cudaFuncGetAttributes(&attributes, add));
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, add, 256, 0));
    REQUIRE(f[8] == 0 && f[9] == 1024 && f[12] == 1);
    REQUIRE(f[10] == blocks && f[11] == attributes.maxThreadsPerBlock);
    REQUIRE(f[13] != cudaSuccess && f[14] == f[13] && f[15] == cudaSuccess && f[16] == cudaSuccess);
    OK("%d links of a chain", links);
}
