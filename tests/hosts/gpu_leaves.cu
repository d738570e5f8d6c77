// Waits for work of a process that is killed before it is done. Prints what the wait came to.
#include "../programs/sockets.h"
#include <csignal>
#include <sys/wait.h>

__global__ void forever(volatile uint32_t *word) { while (*word == 0); }

// Records an event that it has been sent, behind work that does not end.
static int leaver(int socket)
{
    cudaIpcEventHandle_t handle;
    hear(socket, &handle, sizeof handle);
    cudaEvent_t event;
    uint32_t *word;
    CUDA(cudaIpcOpenEventHandle(&event, handle));
    CUDA(cudaMalloc(&word, sizeof *word));
    CUDA(cudaMemset(word, 0, sizeof *word));
    forever<<<1, 1>>>(word);
    CUDA(cudaEventRecord(event));
    REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
    say(socket, "r", 1);
    for (;;) pause();
}

int main()
{
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    pid_t child = fork();
    if (child == 0) return leaver(ends[1]);
    cudaEvent_t event;
    cudaIpcEventHandle_t handle;
    char byte;
    CUDA(cudaEventCreateWithFlags(&event, cudaEventInterprocess | cudaEventDisableTiming));
    CUDA(cudaIpcGetEventHandle(&handle, event));
    say(ends[0], &handle, sizeof handle);
    hear(ends[0], &byte, 1);
    CUDA(cudaStreamWaitEvent(0, event, 0));
    REQUIRE(cudaStreamQuery(0) == cudaErrorNotReady);
    REQUIRE(kill(child, SIGKILL) == 0 && waitpid(child, nullptr, 0) == child);
    std::printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
}
