// Capture mode is per thread: a global capture forbids unsafe calls here, a relaxed thread may.
// build: -Xcompiler -pthread
#include "check.h"
#include <thread>

__global__ void kernel(int *p) { *p += 1; }

int main()
{
    Device<int> d(1);
    CUDA(cudaMemset(d, 0, 4));
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    cudaGraph_t graph;
    void *p;

    // Thread-local: this thread may not, another may.
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    std::thread([] {
        void *q;
        CUDA(cudaMalloc(&q, 1 << 20));
        CUDA(cudaFree(q));
    }).join();
    kernel<<<1, 1, 0, s>>>(d);
    CUDA(cudaStreamEndCapture(s, &graph));
    CUDA(cudaGraphDestroy(graph));

    // Relaxed: even this thread may.
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeRelaxed));
    CUDA(cudaMalloc(&p, 1 << 20));
    kernel<<<1, 1, 0, s>>>(d);
    CUDA(cudaStreamEndCapture(s, &graph));
    CUDA(cudaGraphDestroy(graph));
    CUDA(cudaFree(p));

    // Synchronising a capturing stream is refused and spoils the capture.
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    kernel<<<1, 1, 0, s>>>(d);
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(s));
    EXPECT(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(s, &graph));
    (void)cudaGetLastError();

    // A forked stream that never joined.
    cudaStream_t t;
    cudaEvent_t e;
    CUDA(cudaStreamCreate(&t));
    CUDA(cudaEventCreate(&e));
    CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    kernel<<<1, 1, 0, s>>>(d);
    CUDA(cudaEventRecord(e, s));
    CUDA(cudaStreamWaitEvent(t, e, 0));
    kernel<<<1, 1, 0, t>>>(d);
    EXPECT(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(s, &graph));
    (void)cudaGetLastError();

    kernel<<<1, 1, 0, s>>>(d);
    CUDA(cudaStreamSynchronize(s));
    REQUIRE(d.host()[0] == 1);
    OK("four captures");
}
