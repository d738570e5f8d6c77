// Shared mappings, registered: files by descriptor and by name, seen by kernels and by another
// process.
// checkpoint refused: registered a shared mapping
// move refused: a shared mapping of a file
// far refused: cudaHostRegister
#include "check.h"
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static const int n = 10000, page = 4096;
static const size_t bytes = 16 * page;

__global__ void triple(int *p, int n)
{
    for (int i = threadIdx.x; i < n; i += blockDim.x) p[i] *= 3;
}

static int *map(int fd, off_t offset = 0)
{
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
    REQUIRE(p != MAP_FAILED);
    return (int *)p;
}

// Registers, has the device read and write by each way, and unregisters.
static void use(int *p)
{
    for (int i = 0; i < n; i++) p[i] = i;
    CUDA(cudaHostRegister(p, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    int *alias;
    CUDA(cudaHostGetDevicePointer((void **)&alias, p, 0));
    triple<<<1, 256>>>(alias, n);
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(p[i] == 3 * i);
    p[7] = -7;
    Device<int> d(n);
    CUDA(cudaMemcpyAsync(d, p, n * sizeof(int), cudaMemcpyHostToDevice));
    triple<<<1, 256>>>(d, n);
    CUDA(cudaMemcpyAsync(p, d, n * sizeof(int), cudaMemcpyDeviceToHost));
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < n; i++) REQUIRE(p[i] == (i == 7 ? -21 : 9 * i));
    std::vector<int> copy(n);
    CUDA(cudaMemcpy(copy.data(), p, n * sizeof(int), cudaMemcpyHostToHost));
    REQUIRE(copy[8] == 72);
    CUDA(cudaHostUnregister(p));
    for (int i = 0; i < n; i++) REQUIRE(p[i] == (i == 7 ? -21 : 9 * i));
}

// Another process sees what kernels write, and they see what it writes.
static void together()
{
    int fd = memfd_create("together", 0), go[2], done[2];
    REQUIRE(fd >= 0 && ftruncate(fd, bytes) == 0 && pipe(go) == 0 && pipe(done) == 0);
    int *p = map(fd);
    char c = 0;
    pid_t child = fork();
    if (child == 0) {
        // A parent that fails is the end of the pipe.
        close(go[1]);
        for (int i = 0; i < n; i++) p[i] = 100 + i;
        bool good = write(done[1], &c, 1) == 1 && read(go[0], &c, 1) == 1;
        for (int i = 0; i < n; i++) good = good && p[i] == 3 * (100 + i);
        p[0] = 5;
        _exit(good ? 0 : 1);
    }
    REQUIRE(read(done[0], &c, 1) == 1);
    CUDA(cudaHostRegister(p, bytes, cudaHostRegisterMapped));
    int *alias, status;
    CUDA(cudaHostGetDevicePointer((void **)&alias, p, 0));
    triple<<<1, 256>>>(alias, n);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(write(go[1], &c, 1) == 1 && waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    triple<<<1, 256>>>(alias, 1);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(p[0] == 15);
    CUDA(cudaHostUnregister(p));
    munmap(p, bytes);
    close(fd);
}

int main()
{
    // The child must not have CUDA.
    together();
    int fd = memfd_create("registered", 0);
    REQUIRE(fd >= 0 && ftruncate(fd, bytes + 3 * page) == 0);
    int *p = map(fd, 3 * page);
    use(p);
    use(p);
    // Two registrations that share a page, which stays until both have ended.
    char *q = (char *)p;
    CUDA(cudaHostRegister(q, 2 * page + 512, 0));
    CUDA(cudaHostRegister(q + 2 * page + 512, 2 * page, 0));
    CUDA(cudaHostUnregister(q));
    Device<char> d(2 * page);
    CUDA(cudaMemset(d, 9, 2 * page));
    CUDA(cudaMemcpy(q + 2 * page + 512, d, 2 * page, cudaMemcpyDeviceToHost));
    char there = 0;
    REQUIRE(pread(fd, &there, 1, 5 * page + 600) == 1 && there == 9);
    CUDA(cudaHostUnregister(q + 2 * page + 512));
    close(fd);
    munmap(p, bytes);

    // As NCCL does: the descriptor is closed, the name stays until it is registered.
    std::string name = "/kedge-registered-" + std::to_string(getpid());
    fd = shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    REQUIRE(fd >= 0 && ftruncate(fd, bytes) == 0);
    p = map(fd);
    close(fd);
    CUDA(cudaHostRegister(p, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    shm_unlink(name.c_str());
    int *alias;
    CUDA(cudaHostGetDevicePointer((void **)&alias, p, 0));
    p[1] = 11;
    triple<<<1, 32>>>(alias, 2);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(p[1] == 33);
    CUDA(cudaHostUnregister(p));
    REQUIRE(p[1] == 33);
    OK("%zu bytes", bytes);
}
