// A memory pool that two processes use: one allocates from it, the other opens its allocations.
// far checkpoint refused: which no checkpoint keeps as yet
// move refused: with another process
#include "check.h"
#include <cstring>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static const int n = 100000;

__global__ void add(int *p, int n, int by)
{
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) p[i] += by;
}

static void step(int socket, const void *data, size_t size) { REQUIRE(write(socket, data, size) == (ssize_t)size); }
static void await(int socket, void *data, size_t size) { REQUIRE(recv(socket, data, size, MSG_WAITALL) == (ssize_t)size); }

static void pass(int socket, int &fd, bool sending)
{
    char byte = 'd', control[CMSG_SPACE(sizeof(int))] = {};
    iovec data = {&byte, 1};
    msghdr message = {};
    message.msg_iov = &data, message.msg_iovlen = 1;
    message.msg_control = control, message.msg_controllen = sizeof control;
    if (sending) {
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &fd, sizeof fd);
        REQUIRE(sendmsg(socket, &message, 0) == 1);
    } else {
        REQUIRE(recvmsg(socket, &message, 0) == 1);
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    }
}

static int here(int socket)
{
    int supported = 0, fd = -1;
    CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrMemoryPoolSupportedHandleTypes, 0));
    REQUIRE(supported & cudaMemHandleTypePosixFileDescriptor);
    cudaMemPoolProps props = {};
    props.allocType = cudaMemAllocationTypePinned;
    props.handleTypes = cudaMemHandleTypePosixFileDescriptor;
    props.location.type = cudaMemLocationTypeDevice;
    cudaMemPool_t pool;
    cudaStream_t stream;
    CUDA(cudaMemPoolCreate(&pool, &props));
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaMemPoolExportToShareableHandle(&fd, pool, cudaMemHandleTypePosixFileDescriptor, 0));
    pass(socket, fd, true);
    // Another pool, of which nothing is shown.
    cudaMemPool_t second;
    int second_fd;
    CUDA(cudaMemPoolCreate(&second, &props));
    CUDA(cudaMemPoolExportToShareableHandle(&second_fd, second, cudaMemHandleTypePosixFileDescriptor, 0));
    pass(socket, second_fd, true);
    close(second_fd);
    int *p, *q;
    CUDA(cudaMallocFromPoolAsync((void **)&p, n * sizeof(int), pool, stream));
    CUDA(cudaMallocFromPoolAsync((void **)&q, n * sizeof(int), pool, stream));
    CUDA(cudaMemsetAsync(p, 0, n * sizeof(int), stream));
    CUDA(cudaMemsetAsync(q, 0, n * sizeof(int), stream));
    add<<<64, 256, 0, stream>>>(p, n, 40);
    CUDA(cudaStreamSynchronize(stream));
    for (int *each : {p, q}) {
        cudaMemPoolPtrExportData data;
        CUDA(cudaMemPoolExportPointer(&data, each));
        step(socket, &data, sizeof data);
    }
    char done;
    await(socket, &done, 1);
    std::vector<int> got(n);
    for (auto [each, value] : {std::pair{p, 42}, std::pair{q, 7}}) {
        CUDA(cudaMemcpy(got.data(), each, n * sizeof(int), cudaMemcpyDeviceToHost));
        for (int i = 0; i < n; i++) REQUIRE(got[i] == value);
        CUDA(cudaFreeAsync(each, stream));
    }
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaMemPoolDestroy(pool));
    CUDA(cudaMemPoolDestroy(second));
    close(fd);
    return 0;
}

static int there(int socket)
{
    int fd;
    pass(socket, fd, false);
    cudaMemPool_t pool;
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    CUDA(cudaMemPoolImportFromShareableHandle(&pool, (void *)(uintptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    close(fd);
    cudaMemPool_t second;
    pass(socket, fd, false);
    CUDA(cudaMemPoolImportFromShareableHandle(&second, (void *)(uintptr_t)fd, cudaMemHandleTypePosixFileDescriptor, 0));
    close(fd);
    int *p[2];
    for (int i = 0; i < 2; i++) {
        cudaMemPoolPtrExportData data;
        await(socket, &data, sizeof data);
        // A pointer opens by its own pool alone.
        void *wrong;
        REQUIRE(cudaMemPoolImportPointer(&wrong, second, &data) != cudaSuccess);
        cudaGetLastError();
        CUDA(cudaMemPoolImportPointer((void **)&p[i], pool, &data));
    }
    add<<<64, 256, 0, stream>>>(p[0], n, 2);
    add<<<64, 256, 0, stream>>>(p[1], n, 7);
    std::vector<int> got(n);
    CUDA(cudaMemcpyAsync(got.data(), p[0], n * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    for (int i = 0; i < n; i++) REQUIRE(got[i] == 42);
    CUDA(cudaFreeAsync(p[0], stream));
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaFree(p[1]));
    CUDA(cudaMemPoolDestroy(pool));
    CUDA(cudaMemPoolDestroy(second));
    step(socket, "d", 1);
    return 0;
}

int main()
{
    int sockets[2], status;
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) == 0);
    pid_t child = fork();
    REQUIRE(child >= 0);
    // Whoever is left alone finds the other end closed.
    close(sockets[child == 0 ? 0 : 1]);
    if (child == 0) _exit(there(sockets[1]));
    here(sockets[0]);
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK("%d ints", n);
}
