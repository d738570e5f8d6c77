// Device printf: every conversion, many threads, ordered with the host's own output.
#include "check.h"
#include <cstring>
#include <string>
#include <unistd.h>

__global__ void print()
{
    printf("%d %5d|%-5d|%05d %u %x %#o\n", -1, 42, 42, 42, 4000000000u, 0xbeef, 8);
    printf("%lld %llx %c %s %%\n", -5000000000ll, 0x123456789abcull, 'z', "text");
    printf("%f %.3e %g %8.2f %p\n", 1.5, 12345.678, 0.0001, -2.345, (void *)0x10);
}

__global__ void many() { printf("t %d.%d\n", blockIdx.x, threadIdx.x); }

int main()
{
    // Standard output goes to a file, so that what was printed can be read back.
    char name[] = "/tmp/kedge-printf-XXXXXX";
    int file = mkstemp(name), saved = dup(1);
    REQUIRE(file >= 0 && saved >= 0);
    fflush(stdout);
    dup2(file, 1);
    printf("before\n");
    print<<<1, 1>>>();
    CUDA(cudaDeviceSynchronize());
    printf("after\n");
    many<<<3, 40>>>();
    cudaError_t status = cudaDeviceSynchronize();
    fflush(stdout);
    dup2(saved, 1);
    CUDA(status);
    std::string text(lseek(file, 0, SEEK_END), ' ');
    REQUIRE(pread(file, &text[0], text.size(), 0) == ssize_t(text.size()));
    unlink(name);
    std::string want = "before\n"
                       "-1    42|42   |00042 4000000000 beef 010\n"
                       "-5000000000 123456789abc z text %\n"
                       "1.500000 1.235e+04 0.0001    -2.35 0x10\n"
                       "after\n";
    if (text.compare(0, want.size(), want)) printf("%s", text.c_str());
    REQUIRE(text.compare(0, want.size(), want) == 0);
    std::string rest = text.substr(want.size());
    for (int b = 0; b < 3; b++)
        for (int t = 0; t < 40; t++)
            REQUIRE(rest.find("t " + std::to_string(b) + "." + std::to_string(t) + "\n") != std::string::npos);
    OK("%zu bytes", text.size());
}
