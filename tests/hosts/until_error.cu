// Launches and synchronises until a call fails, then says which error came and how long the failing
// call took, and goes on living. Prints `ready` once it works.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <unistd.h>

__global__ void add(int *p) { atomicAdd(p, 1); }

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "sync";
    int *p;
    if (cudaMalloc(&p, 4) != cudaSuccess) return 3;
    cudaMemset(p, 0, 4);
    if (cudaDeviceSynchronize() != cudaSuccess) return 4;
    printf("ready %d\n", getpid());
    fflush(stdout);
    if (!strcmp(how, "idle")) sleep(2);
    cudaError_t status = cudaSuccess;
    auto before = std::chrono::steady_clock::now();
    while (status == cudaSuccess) {
        before = std::chrono::steady_clock::now();
        add<<<1, 32>>>(p);
        if (strcmp(how, "post")) status = cudaDeviceSynchronize();
        else status = cudaGetLastError();
    }
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    printf("error %s after %.3f s\n", cudaGetErrorName(status), seconds);
    // Later calls fail as well, and soon.
    void *q;
    before = std::chrono::steady_clock::now();
    bool still = cudaMalloc(&q, 4) != cudaSuccess && cudaDeviceSynchronize() != cudaSuccess;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - before).count();
    printf("%s alive, later calls %.3f s\n", still ? "ok" : "wrong:", seconds);
    return still ? 0 : 1;
}
