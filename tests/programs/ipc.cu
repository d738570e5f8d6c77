// Two processes share device memory and events: by descriptors, and by IPC handles.
// build: {cuda}
// far checkpoint refused: which no checkpoint keeps as yet
// move refused: with another process
#include "sockets.h"
#include <cuda.h>
#include <string>
#include <sys/wait.h>

// Spins for a while first, so that whoever does not wait sees too little.
__global__ void add(int *p, int n, int value, long long spin)
{
    long long begin = clock64();
    while (clock64() - begin < spin) {
    }
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] += value;
}

static void step(int socket, char name) { say(socket, &name, 1); }

static void await(int socket, char name)
{
    char heard;
    hear(socket, &heard, 1);
    REQUIRE(heard == name);
}

#define all_are(...) all_are_at(__LINE__, __VA_ARGS__)
static void all_are_at(int line, const int *device, int n, int value)
{
    std::vector<int> got(n);
    CUDA(cudaMemcpy(got.data(), device, n * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < n; i++) {
        if (got[i] != value) std::printf("line %d: element %d is %d, not %d\n", line, i, got[i], value);
        REQUIRE(got[i] == value);
    }
}

constexpr int N = 100000;
constexpr long long SPIN = 20000000;

struct Mapped {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    size_t size;
};

static Mapped map(CUmemGenericAllocationHandle handle, size_t size, CUmemLocation location)
{
    Mapped mapped = {handle, 0, size};
    DRIVER(cuMemAddressReserve(&mapped.address, size, 0, 0, 0));
    DRIVER(cuMemMap(mapped.address, size, 0, handle, 0));
    CUmemAccessDesc access = {location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER(cuMemSetAccess(mapped.address, size, &access, 1));
    return mapped;
}

static void unmap(const Mapped &mapped)
{
    DRIVER(cuMemUnmap(mapped.address, mapped.size));
    DRIVER(cuMemAddressFree(mapped.address, mapped.size));
    DRIVER(cuMemRelease(mapped.handle));
}

// Physical memory travels as a descriptor; what one process writes, the other reads, and back. It
// outlives the handle and the mappings of the process that made it.
static void descriptors_here(int socket)
{
    CUmemAllocationProp prop = shareable_memory();
    size_t chunk;
    DRIVER(cuMemGetAllocationGranularity(&chunk, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemGenericAllocationHandle handle, kept;
    DRIVER(cuMemCreate(&handle, 2 * chunk, &prop, 0));
    Mapped mapped = map(handle, 2 * chunk, prop.location);
    CUDA(cudaMemset((void *)mapped.address, 0, N * sizeof(int)));
    add<<<1, 256>>>((int *)mapped.address, N, 11, 0);
    CUDA(cudaDeviceSynchronize());
    DRIVER(cuMemRetainAllocationHandle(&kept, (void *)mapped.address));
    int fd = -1;
    DRIVER(cuMemExportToShareableHandle(&fd, kept, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    DRIVER(cuMemRelease(kept));
    send_descriptor(socket, fd);
    REQUIRE(close(fd) == 0);
    say(socket, &mapped.size, sizeof mapped.size);
    await(socket, 'a');
    all_are((int *)mapped.address, N, 18);
    unmap(mapped);
    step(socket, 'b');
    // Memory that was not made for it is not exported.
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    DRIVER(cuMemCreate(&handle, chunk, &prop, 0));
    REQUIRE(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS);
    DRIVER(cuMemRelease(handle));
}

static void descriptors_there(int socket)
{
    int fd = receive_descriptor(socket);
    size_t size;
    hear(socket, &size, sizeof size);
    CUmemGenericAllocationHandle handle;
    int pipes[2];
    REQUIRE(pipe(pipes) == 0);
    auto import = [&](long number) {
        return cuMemImportFromShareableHandle(&handle, (void *)number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    };
    REQUIRE(import(pipes[0]) != CUDA_SUCCESS);
    REQUIRE(import(1000000) != CUDA_SUCCESS);
    DRIVER(import(fd));
    REQUIRE(close(fd) == 0);
    CUmemAllocationProp prop;
    DRIVER(cuMemGetAllocationPropertiesFromHandle(&prop, handle));
    REQUIRE(prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop.location.id == 0);
    Mapped mapped = map(handle, size, shareable_memory().location);
    all_are((int *)mapped.address, N, 11);
    add<<<1, 256>>>((int *)mapped.address, N, 7, 0);
    CUDA(cudaDeviceSynchronize());
    step(socket, 'a');
    await(socket, 'b');
    all_are((int *)mapped.address, N, 18);
    unmap(mapped);
}

struct Handles {
    cudaIpcMemHandle_t first, second;
    cudaIpcEventHandle_t written, answered;
    int inside;
};

static cudaEvent_t event()
{
    cudaEvent_t made;
    CUDA(cudaEventCreateWithFlags(&made, cudaEventInterprocess | cudaEventDisableTiming));
    return made;
}

// Ordinary allocations by handles, of which two may lie side by side; events order the two
// processes' streams.
static void handles_here(int socket)
{
    Device<int> first(N), second(3);
    CUDA(cudaMemset(first, 0, N * sizeof(int)));
    CUDA(cudaMemset(second, 0, 3 * sizeof(int)));
    Handles handles = {};
    cudaEvent_t written = event(), answered = event();
    CUDA(cudaIpcGetMemHandle(&handles.first, first.data));
    CUDA(cudaIpcGetMemHandle(&handles.second, second.data));
    CUDA(cudaIpcGetEventHandle(&handles.written, written));
    CUDA(cudaIpcGetEventHandle(&handles.answered, answered));
    cudaIpcMemHandle_t again;
    CUDA(cudaIpcGetMemHandle(&again, first.data));
    REQUIRE(memcmp(&again, &handles.first, sizeof again) == 0);
    say(socket, &handles, sizeof handles);
    await(socket, 'o');
    for (int round = 1; round <= 3; round++) {
        add<<<1, 256>>>(first, N, 1, SPIN);
        CUDA(cudaEventRecord(written));
        step(socket, 'w');
        await(socket, 'r');
        // The other process has recorded it, its work may not be over.
        CUDA(cudaStreamWaitEvent(0, answered, 0));
        add<<<1, 256>>>(first, N, 1, 0);
        CUDA(cudaDeviceSynchronize());
        all_are(first, N, round * 12);
    }
    add<<<1, 256>>>(second, 3, 5, SPIN);
    CUDA(cudaEventRecord(written));
    step(socket, 'w');
    await(socket, 'c');
    all_are(second, 3, 5);
    CUDA(cudaEventDestroy(written));
    CUDA(cudaEventDestroy(answered));
    // An event of one process alone has no handle, nor has host memory.
    CUDA(cudaEventCreateWithFlags(&written, cudaEventDisableTiming));
    REQUIRE(cudaIpcGetEventHandle(&handles.written, written) != cudaSuccess);
    void *host;
    CUDA(cudaMallocHost(&host, 64));
    REQUIRE(cudaIpcGetMemHandle(&handles.first, host) != cudaSuccess);
    cudaGetLastError();
    CUDA(cudaFreeHost(host));
}

static void handles_there(int socket)
{
    Handles handles;
    hear(socket, &handles, sizeof handles);
    int *first, *again, *second;
    auto open = [](int **out, cudaIpcMemHandle_t handle) {
        return cudaIpcOpenMemHandle((void **)out, handle, cudaIpcMemLazyEnablePeerAccess);
    };
    CUDA(open(&first, handles.first));
    CUDA(open(&second, handles.second));
    CUDA(open(&again, handles.first));
    REQUIRE(again == first && second != first);
    cudaPointerAttributes attributes;
    CUDA(cudaPointerGetAttributes(&attributes, first));
    REQUIRE(attributes.type == cudaMemoryTypeDevice && attributes.device == 0);
    cudaIpcMemHandle_t nonsense = {};
    REQUIRE(open(&again, nonsense) != cudaSuccess);
    cudaGetLastError();
    cudaEvent_t written, answered;
    CUDA(cudaIpcOpenEventHandle(&written, handles.written));
    CUDA(cudaIpcOpenEventHandle(&answered, handles.answered));
    step(socket, 'o');
    for (int round = 1; round <= 3; round++) {
        await(socket, 'w');
        CUDA(cudaStreamWaitEvent(0, written, 0));
        add<<<1, 256>>>(first, N, 10, SPIN);
        CUDA(cudaEventRecord(answered));
        step(socket, 'r');
    }
    await(socket, 'w');
    CUDA(cudaEventSynchronize(written));
    REQUIRE(cudaEventQuery(written) == cudaSuccess);
    all_are(second, 3, 5);
    // Closed as often as it was opened.
    CUDA(cudaIpcCloseMemHandle(first));
    CUDA(cudaIpcCloseMemHandle(second));
    CUDA(cudaIpcCloseMemHandle(first));
    REQUIRE(cudaIpcCloseMemHandle(first) != cudaSuccess);
    cudaGetLastError();
    CUDA(cudaEventDestroy(written));
    CUDA(cudaEventDestroy(answered));
    step(socket, 'c');
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        int socket = std::atoi(argv[1]);
        CUDA(cudaFree(nullptr));
        descriptors_there(socket);
        handles_there(socket);
        return 0;
    }
    int sockets[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    // Before CUDA starts here.
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        close(sockets[0]);
        std::string socket = std::to_string(sockets[1]);
        execl("/proc/self/exe", argv[0], socket.c_str(), (char *)nullptr);
        _exit(99);
    }
    close(sockets[1]);
    CUDA(cudaFree(nullptr));
    descriptors_here(sockets[0]);
    handles_here(sockets[0]);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK("memory and events of two processes");
}
