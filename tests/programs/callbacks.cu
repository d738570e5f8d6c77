// Host functions and stream callbacks run in order, in this process, and may take their time.
#include "check.h"
#include <atomic>
#include <unistd.h>

static std::atomic<int> stage{0};
static pid_t me;

static void CUDART_CB advance(void *from)
{
    REQUIRE(getpid() == me);
    usleep(20000);
    int want = int(reinterpret_cast<intptr_t>(from));
    REQUIRE(stage.compare_exchange_strong(want, want + 1));
}

static void CUDART_CB old_style(cudaStream_t, cudaError_t status, void *data)
{
    REQUIRE(status == cudaSuccess);
    advance(data);
}

__global__ void increment(int *p) { ++*p; }

int main()
{
    me = getpid();
    int *cell;
    CUDA(cudaHostAlloc((void **)&cell, 4, cudaHostAllocMapped));
    *cell = 0;
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    for (intptr_t i = 0; i < 3; i++) {
        increment<<<1, 1, 0, s>>>(cell);
        CUDA(cudaLaunchHostFunc(s, advance, (void *)(2 * i)));
        CUDA(cudaStreamAddCallback(s, old_style, (void *)(2 * i + 1), 0));
    }
    CUDA(cudaStreamSynchronize(s));
    REQUIRE(stage == 6 && *cell == 3);
    OK("six callbacks");
}
