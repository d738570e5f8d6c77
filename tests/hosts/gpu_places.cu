// Devices of several places. `places N,N…`: at which place each device is; then what to do:
// add (the default), cross, host, fault, wait FILE.
#include <cuda_runtime.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>
#include <vector>

#define CUDA(call)                                                                                \
    do {                                                                                          \
        cudaError_t error_ = (call);                                                              \
        if (error_ != cudaSuccess) {                                                              \
            printf("line %d: %s\n", __LINE__, cudaGetErrorName(error_));                          \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)
#define REQUIRE(what)                                                                             \
    do {                                                                                          \
        if (!(what)) {                                                                            \
            printf("line %d: not so: %s\n", __LINE__, #what);                                     \
            exit(1);                                                                              \
        }                                                                                         \
    } while (0)

static std::vector<int> places;

__global__ void vector_add(const int *a, const int *b, int *sum, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) sum[i] = a[i] + b[i];
}

__global__ void fill(int *p, int n, int base)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] = base + i;
}

__global__ void scale(int *p, int n, int by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] *= by;
}

__global__ void say(int device) { printf("device %d speaks\n", device); }

__device__ int variable;
__global__ void keep(int value) { variable = value; }

static void add_on(int device)
{
    const int n = 10000;
    std::vector<int> a(n), b(n), sum(n);
    for (int i = 0; i < n; i++) a[i] = i * (device + 1), b[i] = 7 * i;
    int *da, *db, *ds;
    CUDA(cudaSetDevice(device));
    CUDA(cudaMalloc(&da, n * 4));
    CUDA(cudaMalloc(&db, n * 4));
    CUDA(cudaMalloc(&ds, n * 4));
    CUDA(cudaMemcpy(da, a.data(), n * 4, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(db, b.data(), n * 4, cudaMemcpyHostToDevice));
    vector_add<<<(n + 255) / 256, 256>>>(da, db, ds, n);
    CUDA(cudaMemcpy(sum.data(), ds, n * 4, cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) REQUIRE(sum[i] == i * (device + 8));
    keep<<<1, 1>>>(1000 + device);
    say<<<1, 1>>>(device);
    CUDA(cudaDeviceSynchronize());
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, ds));
    REQUIRE(attributes.device == device && attributes.type == cudaMemoryTypeDevice);
    CUDA(cudaFree(da));
    CUDA(cudaFree(db));
    CUDA(cudaFree(ds));
}

static void add()
{
    int count = places.size();
    for (int device = 0; device < count; device++) add_on(device);
    for (int device = 0; device < count; device++) {
        int value;
        CUDA(cudaSetDevice(device));
        CUDA(cudaMemcpyFromSymbol(&value, variable, 4));
        REQUIRE(value == 1000 + device);
    }
    for (int a = 0; a < count; a++) {
        for (int b = 0; b < count; b++) {
            int can;
            CUDA(cudaDeviceCanAccessPeer(&can, a, b));
            REQUIRE(can == (a != b && places[a] == places[b]));
            CUDA(cudaSetDevice(a));
            if (a != b && places[a] != places[b]) {
                REQUIRE(cudaDeviceEnablePeerAccess(b, 0) == cudaErrorPeerAccessUnsupported);
                (void)cudaGetLastError();
            }
        }
    }
}

// From device to device around, in streams and by events; n ints.
static void around(int n)
{
    int count = places.size(), blocks = (n + 255) / 256;
    std::vector<int *> at(count);
    std::vector<cudaStream_t> stream(count);
    std::vector<cudaEvent_t> ready(count);
    for (int device = 0; device < count; device++) {
        CUDA(cudaSetDevice(device));
        CUDA(cudaMalloc(&at[device], n * 4));
        CUDA(cudaMemset(at[device], 0xee, n * 4));
        // Its streams do not wait for that.
        CUDA(cudaDeviceSynchronize());
        CUDA(cudaStreamCreateWithFlags(&stream[device], cudaStreamNonBlocking));
        CUDA(cudaEventCreateWithFlags(&ready[device], cudaEventDisableTiming));
    }
    CUDA(cudaSetDevice(0));
    fill<<<blocks, 256, 0, stream[0]>>>(at[0], n, 5);
    CUDA(cudaEventRecord(ready[0], stream[0]));
    for (int device = 1; device < count; device++) {
        CUDA(cudaSetDevice(device));
        // In the stream of who reads, and every other time of who writes.
        if (device % 2) {
            CUDA(cudaStreamWaitEvent(stream[device], ready[device - 1], 0));
            CUDA(cudaMemcpyPeerAsync(at[device], device, at[device - 1], device - 1, n * 4,
                                     stream[device]));
        } else {
            CUDA(cudaSetDevice(device - 1));
            CUDA(cudaMemcpyPeerAsync(at[device], device, at[device - 1], device - 1, n * 4,
                                     stream[device - 1]));
            CUDA(cudaEventRecord(ready[device - 1], stream[device - 1]));
            CUDA(cudaSetDevice(device));
            CUDA(cudaStreamWaitEvent(stream[device], ready[device - 1], 0));
        }
        scale<<<blocks, 256, 0, stream[device]>>>(at[device], n, device + 1);
        CUDA(cudaEventRecord(ready[device], stream[device]));
    }
    std::vector<int> got(n);
    CUDA(cudaMemcpyAsync(got.data(), at[count - 1], n * 4, cudaMemcpyDeviceToHost,
                         stream[count - 1]));
    CUDA(cudaStreamSynchronize(stream[count - 1]));
    unsigned by = 1;
    for (int device = 1; device < count; device++) by *= device + 1;
    for (int i = 0; i < n; i++) REQUIRE((unsigned)got[i] == (5u + i) * by);
    for (int device = 0; device < count; device++) {
        CUDA(cudaSetDevice(device));
        CUDA(cudaFree(at[device]));
        CUDA(cudaStreamDestroy(stream[device]));
        CUDA(cudaEventDestroy(ready[device]));
    }
}

// Each device's memory is reached from any device's stream.
static void from_elsewhere()
{
    const int n = 3000;
    int count = places.size();
    std::vector<int> out(n), got(n);
    int *pinned;
    CUDA(cudaMallocHost(&pinned, n * 4));
    for (int device = 0; device < count; device++) {
        int *p;
        CUDA(cudaSetDevice(device));
        CUDA(cudaMalloc(&p, n * 4));
        for (int other = 0; other < count; other++) {
            CUDA(cudaSetDevice(other));
            for (int i = 0; i < n; i++) out[i] = 100 * device + 10 * other + i, pinned[i] = -i;
            CUDA(cudaMemcpy(p, out.data(), n * 4, cudaMemcpyDefault));
            CUDA(cudaMemcpy(p, out.data(), 64, cudaMemcpyDefault));
            CUDA(cudaMemset(p, 1, 4));
            CUDA(cudaMemcpy(got.data(), p, n * 4, cudaMemcpyDefault));
            REQUIRE(got[0] == 0x01010101);
            for (int i = 1; i < n; i++) REQUIRE(got[i] == out[i]);
            CUDA(cudaMemcpy(p, pinned, n * 4, cudaMemcpyDefault));
            memset(pinned, 0, n * 4);
            CUDA(cudaMemcpy(pinned, p, n * 4, cudaMemcpyDefault));
            for (int i = 0; i < n; i++) REQUIRE(pinned[i] == -i);
        }
        CUDA(cudaFree(p));
    }
    CUDA(cudaFreeHost(pinned));
}

// Rows with gaps, of both sides.
static void rows()
{
    const size_t width = 300, height = 40;
    int last = places.size() - 1;
    unsigned char *a, *b;
    size_t pa, pb;
    std::vector<unsigned char> out(width * height), got(width * height);
    for (size_t i = 0; i < out.size(); i++) out[i] = i * 7;
    CUDA(cudaSetDevice(0));
    CUDA(cudaMallocPitch(&a, &pa, width, height));
    CUDA(cudaMemcpy2D(a, pa, out.data(), width, width, height, cudaMemcpyHostToDevice));
    CUDA(cudaSetDevice(last));
    CUDA(cudaMallocPitch(&b, &pb, width + 700, height));
    CUDA(cudaMemcpy2D(b, pb, a, pa, width, height, cudaMemcpyDefault));
    CUDA(cudaMemcpy2D(got.data(), width, b, pb, width, height, cudaMemcpyDeviceToHost));
    REQUIRE(got == out);
    CUDA(cudaFree(b));
    CUDA(cudaFree(a));
}

static void CUDART_CB write_it(void *at) { *(int *)at = 4711; }
__global__ void twice(volatile int *p) { *p = *p * 2; }

// Host functions, and memory that the host and all devices see.
static void host()
{
    int *both;
    CUDA(cudaMallocHost(&both, 4096));
    for (size_t device = 0; device < places.size(); device++) {
        size_t other = (device + 1) % places.size();
        cudaStream_t one, next;
        cudaEvent_t done;
        CUDA(cudaSetDevice(device));
        CUDA(cudaStreamCreate(&one));
        CUDA(cudaEventCreate(&done));
        *both = 0;
        CUDA(cudaLaunchHostFunc(one, write_it, both));
        twice<<<1, 1, 0, one>>>(both);
        CUDA(cudaEventRecord(done, one));
        CUDA(cudaSetDevice(other));
        CUDA(cudaStreamCreate(&next));
        CUDA(cudaStreamWaitEvent(next, done, 0));
        twice<<<1, 1, 0, next>>>(both);
        CUDA(cudaStreamSynchronize(next));
        REQUIRE(*both == 4 * 4711);
        CUDA(cudaStreamDestroy(next));
        CUDA(cudaStreamDestroy(one));
        CUDA(cudaEventDestroy(done));
    }
    CUDA(cudaFreeHost(both));
}

__global__ void stray() { *(volatile int *)nullptr = 1; }

// The last device faults again and again while its stream holds copies between the first two; they
// copy on.
static void fault()
{
    const int n = 6 << 20, blocks = (n + 255) / 256;
    int *from, *to, last = places.size() - 1;
    CUDA(cudaSetDevice(0));
    CUDA(cudaMalloc(&from, n * 4));
    fill<<<blocks, 256>>>(from, n, 3);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaSetDevice(1));
    CUDA(cudaMalloc(&to, n * 4));
    for (int turn = 0; turn < 6; turn++) {
        cudaStream_t copies, faults;
        CUDA(cudaSetDevice(last));
        CUDA(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
        CUDA(cudaStreamCreateWithFlags(&faults, cudaStreamNonBlocking));
        CUDA(cudaMemcpyPeerAsync(to, 1, from, 0, n * 4, copies));
        stray<<<1, 1, 0, faults>>>();
        REQUIRE(cudaStreamSynchronize(faults) == cudaErrorIllegalAddress);
        CUDA(cudaDeviceReset());
    }
    cudaStream_t stream;
    std::vector<int> got(n);
    CUDA(cudaSetDevice(1));
    CUDA(cudaMemset(to, 0, n * 4));
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaMemcpyPeerAsync(to, 1, from, 0, n * 4, stream));
    CUDA(cudaMemcpyAsync(got.data(), to, n * 4, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; i++) REQUIRE(got[i] == i + 3);
}

// Works on all devices until a file is there, then says how each of them is.
static void until(const char *file)
{
    std::vector<int *> at(places.size());
    for (size_t device = 0; device < places.size(); device++) {
        CUDA(cudaSetDevice(device));
        CUDA(cudaMalloc(&at[device], 4096));
    }
    printf("works\n");
    fflush(stdout);
    for (;;) {
        for (size_t device = 0; device < places.size(); device++) {
            cudaSetDevice(device);
            cudaError_t error = cudaMemset(at[device], 1, 4096);
            if (error == cudaSuccess) error = cudaDeviceSynchronize();
            if (error == cudaSuccess) continue;
            printf("lost: %s\n", cudaGetErrorName(error));
            for (size_t other = 0; other < places.size(); other++) {
                cudaSetDevice(other);
                error = cudaMemset(at[other], 1, 4096);
                REQUIRE(error != cudaSuccess);
            }
            printf("all of them\n");
            exit(3);
        }
        if (access(file, F_OK) == 0) break;
        usleep(1000);
    }
}

int main(int argc, char **argv)
{
    REQUIRE(argc >= 2);
    for (const char *at = argv[1]; *at; at += strcspn(at, ",") + (strchr(at, ',') != nullptr)) {
        places.push_back(atoi(at));
    }
    int count;
    CUDA(cudaGetDeviceCount(&count));
    REQUIRE(count == (int)places.size());
    std::string what = argc > 2 ? argv[2] : "add";
    if (what == "add") add();
    if (what == "cross") {
        around(1000);
        around(5 << 20);
        from_elsewhere();
        rows();
        for (int i = 0; i < 20; i++) around(2000);
    }
    if (what == "host") host();
    if (what == "fault") fault();
    if (what == "wait") until(argv[3]);
    printf("ok\n");
}
