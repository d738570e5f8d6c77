// Two processes that have nothing in common, until they are asked: as soon as a file is there, one
// makes memory, gives the other a descriptor of it, and takes back what that has written there;
// then both let go of it, and the file is removed. Each has some memory of its own all the time.
// Prints a step every so often as gpu_steps does.
// Usage: gpu_exchange STEPS MILLISECONDS FILE
#include "../programs/sockets.h"
#include "steps.h"
#include <cuda.h>
#include <poll.h>
#include <string>
#include <sys/wait.h>

constexpr int N = 1000;
// Of each one's own: it takes a while to cross where that is to be slow.
constexpr size_t OWN = 2 << 20;

static void *own(int byte)
{
    void *memory;
    CUDA(cudaMalloc(&memory, OWN));
    CUDA(cudaMemset(memory, byte, OWN));
    CUDA(cudaDeviceSynchronize());
    return memory;
}

static void is_own(const void *memory, int byte)
{
    std::vector<char> got(OWN);
    CUDA(cudaMemcpy(got.data(), memory, OWN, cudaMemcpyDeviceToHost));
    for (char one : got) REQUIRE(one == byte);
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle, size_t size)
{
    CUdeviceptr address;
    DRIVER(cuMemAddressReserve(&address, size, 0, 0, 0));
    DRIVER(cuMemMap(address, size, 0, handle, 0));
    CUmemAccessDesc access = {shareable_memory().location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    DRIVER(cuMemSetAccess(address, size, &access, 1));
    return address;
}

static void unmap(CUmemGenericAllocationHandle handle, CUdeviceptr address, size_t size)
{
    DRIVER(cuMemUnmap(address, size));
    DRIVER(cuMemAddressFree(address, size));
    DRIVER(cuMemRelease(handle));
}

static void are(CUdeviceptr address, unsigned value)
{
    std::vector<unsigned> got(N);
    DRIVER(cuMemcpyDtoH(got.data(), address, N * sizeof(unsigned)));
    for (unsigned one : got) REQUIRE(one == value);
}

static void give(int socket, unsigned number)
{
    CUmemAllocationProp prop = shareable_memory();
    size_t size;
    DRIVER(cuMemGetAllocationGranularity(&size, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    CUmemGenericAllocationHandle handle;
    DRIVER(cuMemCreate(&handle, size, &prop, 0));
    CUdeviceptr address = map(handle, size);
    DRIVER(cuMemsetD32(address, number, N));
    int fd = -1;
    DRIVER(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    send_descriptor(socket, fd);
    REQUIRE(close(fd) == 0);
    say(socket, &size, sizeof size);
    hear(socket, &number, sizeof number);
    are(address, number);
    unmap(handle, address, size);
}

// Takes what the other gives as often as it gives something.
static int takes(int socket)
{
    void *memory = own(2);
    char byte = 'r';
    say(socket, &byte, 1);
    pollfd waits = {socket, POLLIN, 0};
    while (poll(&waits, 1, -1) == 1 && recv(socket, &byte, 1, MSG_PEEK) == 1) {
        int fd = receive_descriptor(socket);
        size_t size;
        hear(socket, &size, sizeof size);
        CUmemGenericAllocationHandle handle;
        DRIVER(cuMemImportFromShareableHandle(&handle, (void *)(long)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        REQUIRE(close(fd) == 0);
        CUdeviceptr address = map(handle, size);
        unsigned number;
        DRIVER(cuMemcpyDtoH(&number, address, sizeof number));
        are(address, number);
        number += 7;
        DRIVER(cuMemsetD32(address, number, N));
        unmap(handle, address, size);
        is_own(memory, 2);
        say(socket, &number, sizeof number);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc == 2) return takes(std::atoi(argv[1]));
    Steps steps(argc, argv, 150);
    REQUIRE(argc > 3);
    int sockets[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    // Before CUDA starts here.
    pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        close(sockets[0]);
        execl("/proc/self/exe", argv[0], std::to_string(sockets[1]).c_str(), (char *)nullptr);
        _exit(99);
    }
    close(sockets[1]);
    void *memory = own(1);
    char byte;
    hear(sockets[0], &byte, 1);
    for (unsigned number = 1; number <= steps.count; number++) {
        if (access(argv[3], F_OK) == 0) {
            give(sockets[0], number);
            is_own(memory, 1);
            REQUIRE(unlink(argv[3]) == 0);
        }
        steps.done(number);
        steps.rest();
    }
    close(sockets[0]);
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return steps.well();
}
