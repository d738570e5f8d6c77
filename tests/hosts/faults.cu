// Waits until there is a file, and ends by a kernel's fault: `faults FILE`.
#include "../programs/check.h"
#include <unistd.h>

__global__ void outside(int *p) { *p = 1; }

int main(int count, char **words)
{
    REQUIRE(count == 2);
    CUDA(cudaFree(nullptr));
    std::puts("ready");
    std::fflush(stdout);
    while (access(words[1], F_OK)) usleep(10000);
    outside<<<1, 1>>>((int *)0x10);
    cudaError_t status = cudaDeviceSynchronize();
    std::fputs("my own words\n", stderr);
    return status == cudaErrorIllegalAddress ? 4 : 1;
}
