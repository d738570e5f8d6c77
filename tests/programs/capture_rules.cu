// What stream capture forbids: each violation has its own error and spoils the capture.
#include "check.h"
#include <thread>

__global__ void add(int *p, int by) { atomicAdd(p, by); }

static cudaStream_t a, b;
static cudaGraph_t graph;

static void begin(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed)
{
    CUDA(cudaStreamBeginCapture(stream, mode));
}

static void spoilt(cudaStream_t stream)
{
    graph = (cudaGraph_t)1;
    EXPECT(cudaErrorStreamCaptureInvalidated, cudaStreamEndCapture(stream, &graph));
    REQUIRE(graph == nullptr);
    cudaGetLastError();
}

int main()
{
    Device<int> sum(1);
    cudaEvent_t e, outside;
    CUDA(cudaStreamCreate(&a));
    CUDA(cudaStreamCreate(&b));
    CUDA(cudaEventCreate(&e));
    CUDA(cudaEventCreate(&outside));

    // The legacy stream would wait for the capturing one.
    begin(a);
    add<<<1, 1>>>(sum, 1);
    EXPECT(cudaErrorStreamCaptureImplicit, cudaGetLastError());
    spoilt(a);
    // A capture is never done.
    begin(a);
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaStreamSynchronize(a));
    spoilt(a);
    // A call that may wait, unless the thread's mode allows it.
    void *p;
    begin(a, cudaStreamCaptureModeGlobal);
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaMalloc(&p, 64));
    spoilt(a);
    begin(a, cudaStreamCaptureModeGlobal);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    CUDA(cudaMalloc(&p, 64));
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    CUDA(cudaStreamEndCapture(a, &graph));
    // A branch that is not joined.
    begin(a);
    add<<<1, 1, 0, a>>>(sum, 1);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    add<<<1, 1, 0, b>>>(sum, 1);
    EXPECT(cudaErrorStreamCaptureUnjoined, cudaStreamEndCapture(a, &graph));
    cudaGetLastError();
    cudaStreamCaptureStatus status;
    CUDA(cudaStreamIsCapturing(b, &status));
    REQUIRE(status == cudaStreamCaptureStatusNone);
    // To ask about an event of a capture spoils the capture.
    begin(a);
    CUDA(cudaEventRecord(e, a));
    EXPECT(cudaErrorCapturedEvent, cudaEventQuery(e));
    spoilt(a);
    // Only where, and, if not relaxed, on the thread where it began.
    begin(a);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    EXPECT(cudaErrorStreamCaptureUnmatched, cudaStreamEndCapture(b, &graph));
    spoilt(a);
    begin(a, cudaStreamCaptureModeThreadLocal);
    std::thread([] {
        EXPECT(cudaErrorStreamCaptureWrongThread, cudaStreamEndCapture(a, &graph));
    }).join();
    // That has ended it, too.
    EXPECT(cudaErrorIllegalState, cudaStreamEndCapture(a, &graph));
    CUDA(cudaStreamIsCapturing(a, &status));
    REQUIRE(status == cudaStreamCaptureStatusNone);
    cudaGetLastError();
    // No dependency on what is not captured, none between two captures.
    CUDA(cudaEventRecord(outside, b));
    begin(a);
    EXPECT(cudaErrorStreamCaptureIsolation, cudaStreamWaitEvent(a, outside, 0));
    spoilt(a);
    begin(a);
    begin(b);
    CUDA(cudaEventRecord(e, a));
    EXPECT(cudaErrorStreamCaptureMerge, cudaStreamWaitEvent(b, e, 0));
    spoilt(a);
    spoilt(b);
    // What cannot be captured at all.
    EXPECT(cudaErrorStreamCaptureUnsupported, cudaStreamBeginCapture(0, cudaStreamCaptureModeRelaxed));
    EXPECT(cudaErrorIllegalState, cudaStreamEndCapture(a, &graph));
    cudaGetLastError();

    // And after all that, a capture that is right.
    begin(a, cudaStreamCaptureModeGlobal);
    add<<<1, 1, 0, a>>>(sum, 1);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    add<<<1, 1, 0, b>>>(sum, 10);
    CUDA(cudaEventRecord(e, b));
    CUDA(cudaStreamWaitEvent(a, e, 0));
    CUDA(cudaStreamEndCapture(a, &graph));
    cudaGraphExec_t exec;
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaMemset(sum, 0, 4));
    for (int i = 0; i < 10; i++) CUDA(cudaGraphLaunch(exec, b));
    CUDA(cudaStreamSynchronize(b));
    REQUIRE(sum.host()[0] == 110);
    OK("eleven violations, one capture");
}
