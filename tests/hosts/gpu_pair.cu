// Two processes that work in each other's device memory. Each reads what the other has written: by
// an IPC handle and ordered by IPC events, in memory that travelled as a descriptor (opened again
// every few steps by the descriptor that the program keeps), and in memory of a third process that
// has ended. One handle is passed on at the start and opened late. Compared with the host's numbers
// in each step. Prints as gpu_steps does. Usage: gpu_pair STEPS MILLISECONDS [handles] handles:
// nothing travels as a descriptor.
#include "../programs/sockets.h"
#include "steps.h"
#include <cuda.h>
#include <sys/wait.h>

__global__ void hand_out(uint32_t *own, const uint32_t *state, uint32_t *dead, int rank, uint32_t step)
{
    own[0] = *state;
    dead[rank] = *state + step;
}

__global__ void take_in(uint32_t *state, const uint32_t *other, const uint32_t *dead, int rank, uint32_t step, uint32_t *wrong)
{
    if (dead[1 - rank] != other[0] + step) atomicAdd(wrong, 1);
    *state = Pair::next(*state, other[0], step);
}

// Both are here.
static void meet(int socket)
{
    char byte = 'm';
    say(socket, &byte, 1);
    hear(socket, &byte, 1);
}

// What travels as a descriptor: mapped, with the descriptor at hand.
struct Travels {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr address;
    size_t size;
    int fd;
};

static void map(Travels &travels)
{
    DRIVER(cuMemAddressReserve(&travels.address, travels.size, 0, 0, 0));
    DRIVER(cuMemMap(travels.address, travels.size, 0, travels.handle, 0));
    CUmemAccessDesc access = {shareable_memory().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER(cuMemSetAccess(travels.address, travels.size, &access, 1));
}

static Travels make(int socket)
{
    Travels made = {};
    CUmemAllocationProp prop = shareable_memory();
    DRIVER(cuMemGetAllocationGranularity(&made.size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    DRIVER(cuMemCreate(&made.handle, made.size, &prop, 0));
    map(made);
    DRIVER(cuMemExportToShareableHandle(&made.fd, made.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_descriptor(socket, made.fd);
    return made;
}

static Travels open(int fd)
{
    Travels opened = {};
    opened.fd = fd;
    CUmemAllocationProp prop = shareable_memory();
    DRIVER(cuMemGetAllocationGranularity(&opened.size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    DRIVER(cuMemImportFromShareableHandle(&opened.handle, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    map(opened);
    return opened;
}

static void close(const Travels &travels)
{
    DRIVER(cuMemUnmap(travels.address, travels.size));
    DRIVER(cuMemAddressFree(travels.address, travels.size));
    DRIVER(cuMemRelease(travels.handle));
}

struct Handles {
    cudaIpcMemHandle_t memory, late;
    cudaIpcEventHandle_t written;
};

template <typename T> static T *opened(const cudaIpcMemHandle_t &handle)
{
    T *memory;
    CUDA(cudaIpcOpenMemHandle((void **)&memory, handle, cudaIpcMemLazyEnablePeerAccess));
    return memory;
}

static uint32_t word(const void *device)
{
    uint32_t value;
    CUDA(cudaMemcpy(&value, device, sizeof value, cudaMemcpyDeviceToHost));
    return value;
}

static int rank(int number, int socket, int third, const Steps &steps, bool descriptors)
{
    uint32_t *state, *wrong, *own, *late, mark = steps.nonce + number, zero = 0;
    Pair host;
    CUDA(cudaMalloc(&state, sizeof *state));
    CUDA(cudaMalloc(&wrong, sizeof *wrong));
    CUDA(cudaMalloc(&own, sizeof *own));
    CUDA(cudaMalloc(&late, sizeof *late));
    CUDA(cudaMemcpy(state, &host.ranks[number], sizeof *state, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(late, &mark, sizeof mark, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy(wrong, &zero, sizeof zero, cudaMemcpyHostToDevice));
    cudaEvent_t written, others;
    CUDA(cudaEventCreateWithFlags(&written, cudaEventInterprocess | cudaEventDisableTiming));
    Handles mine, theirs;
    CUDA(cudaIpcGetMemHandle(&mine.memory, own));
    CUDA(cudaIpcGetMemHandle(&mine.late, late));
    CUDA(cudaIpcGetEventHandle(&mine.written, written));
    say(socket, &mine, sizeof mine);
    hear(socket, &theirs, sizeof theirs);
    uint32_t *other = opened<uint32_t>(theirs.memory), *much_later = nullptr;
    CUDA(cudaIpcOpenEventHandle(&others, theirs.written));
    // The third process ends when both have opened its memory.
    cudaIpcMemHandle_t from_third;
    hear(third, &from_third, sizeof from_third);
    uint32_t *dead = opened<uint32_t>(from_third);
    say(third, "o", 1);
    Travels travels = {};
    if (descriptors) travels = number == 0 ? make(socket) : open(receive_descriptor(socket));
    for (uint32_t step = 1; step <= steps.count; step++) {
        hand_out<<<1, 1>>>(own, state, dead, number, step);
        CUDA(cudaEventRecord(written));
        if (descriptors && number == 0) CUDA(cudaMemcpy((void *)travels.address, &step, sizeof step, cudaMemcpyHostToDevice));
        meet(socket);
        CUDA(cudaStreamWaitEvent(0, others, 0));
        CUDA(cudaDeviceSynchronize());
        // The event orders the streams; the memory of the third process has no event of its own.
        meet(socket);
        take_in<<<1, 1>>>(state, other, dead, number, step, wrong);
        if (descriptors && number == 1 && step % 10 == 0) {
            close(travels);
            travels = open(travels.fd);
        }
        uint32_t told = descriptors ? word((void *)travels.address) : step, seen = word(state);
        if (step == steps.count * 4 / 5) much_later = opened<uint32_t>(theirs.late);
        host.step(step);
        if (seen != host.ranks[number] || word(wrong) != 0 || told != step) {
            std::printf("%08x: rank %d: step %u is wrong: %08x %u %u\n", steps.nonce, number, step, seen, word(wrong), told);
            return 1;
        }
        meet(socket);
        if (number == 0) steps.done(step);
        steps.rest();
    }
    if (much_later && word(much_later) != steps.nonce + 1 - number) {
        std::printf("%08x: rank %d: what was opened late is wrong\n", steps.nonce, number);
        return 1;
    }
    meet(socket);
    return 0;
}

// Gives memory to both, and ends.
static int third_process(int first, int second)
{
    uint32_t *memory;
    CUDA(cudaMalloc(&memory, 2 * sizeof *memory));
    CUDA(cudaMemset(memory, 0, 2 * sizeof *memory));
    CUDA(cudaDeviceSynchronize());
    cudaIpcMemHandle_t handle;
    CUDA(cudaIpcGetMemHandle(&handle, memory));
    char byte;
    for (int socket : {first, second}) say(socket, &handle, sizeof handle);
    for (int socket : {first, second}) hear(socket, &byte, 1);
    return 0;
}

int main(int argc, char **argv)
{
    Steps steps(argc, argv, 100);
    bool descriptors = argc < 4 || strcmp(argv[3], "handles") != 0;
    int ends[2], first[2], second[2];
    for (int *pair : {ends, first, second}) {
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) return 2;
    }
    pid_t third = fork();
    if (third == 0) return third_process(first[1], second[1]);
    pid_t other = fork();
    // Who is left alone is not to wait for ever.
    close(ends[other != 0]);
    if (other == 0) return rank(1, ends[1], second[0], steps, descriptors);
    int own = rank(0, ends[0], first[0], steps, descriptors), status = 0, gone = 0;
    waitpid(other, &status, 0);
    waitpid(third, &gone, 0);
    if (own != 0 || status != 0 || gone != 0) return 1;
    return steps.well();
}
