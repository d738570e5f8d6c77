// fork() in a program that uses CUDA only in the parent; the child does other things.
#include "check.h"
#include <sys/wait.h>
#include <unistd.h>

__global__ void fill(int *p, int v) { p[threadIdx.x] = v; }

int main()
{
    Device<int> d(32);
    fill<<<1, 32>>>(d, 1);
    CUDA(cudaDeviceSynchronize());
    for (int round = 2; round < 6; round++) {
        pid_t child = fork();
        REQUIRE(child >= 0);
        if (child == 0) _exit(getpid() > 1 ? 40 + round : 1);
        fill<<<1, 32>>>(d, round);
        int status;
        REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 40 + round);
        for (int x : d.host()) REQUIRE(x == round);
    }
    // A child that tries gets an error, not a hang.
    pid_t child = fork();
    if (child == 0) {
        int *p;
        _exit(cudaMalloc(&p, 4) == cudaSuccess ? 1 : 7);
    }
    int status;
    REQUIRE(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    for (int x : d.host()) REQUIRE(x == 5);
    OK("five children");
}
