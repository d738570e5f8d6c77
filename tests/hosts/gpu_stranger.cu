// Opens what another process shares that is not of its job. Usage: gpu_stranger give|take FILE
// `give` writes a handle of its memory to FILE; `take` opens it. Both say so and wait to be ended.
#include "../programs/check.h"
#include <cstring>
#include <unistd.h>

int main(int argc, char **argv)
{
    if (argc < 3) return 2;
    bool gives = strcmp(argv[1], "give") == 0;
    cudaIpcMemHandle_t handle;
    int *memory;
    if (gives) {
        CUDA(cudaMalloc(&memory, sizeof *memory));
        CUDA(cudaIpcGetMemHandle(&handle, memory));
    }
    FILE *file = std::fopen(argv[2], gives ? "w" : "r");
    REQUIRE(file);
    size_t moved = gives ? std::fwrite(&handle, sizeof handle, 1, file) : std::fread(&handle, sizeof handle, 1, file);
    REQUIRE(moved == 1 && std::fclose(file) == 0);
    if (!gives) CUDA(cudaIpcOpenMemHandle((void **)&memory, handle, cudaIpcMemLazyEnablePeerAccess));
    std::printf("nonce %08x\n", getpid());
    std::fflush(stdout);
    for (;;) pause();
}
