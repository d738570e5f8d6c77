// Streams that wait for values in memory and write them; work of a destroyed stream; a reset
// device.
// build: {cuda}
#include "check.h"
#include <cuda.h>

static CUdeviceptr at(int *p) { return (CUdeviceptr)p; }

int main()
{
    for (int round = 0; round < 2; round++) {
        int *cell;
        CUDA(cudaHostAlloc(&cell, 64, cudaHostAllocMapped));
        volatile int *seen = cell;
        cudaStream_t stream, other;
        CUDA(cudaStreamCreate(&stream));
        CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
        cudaEvent_t event;
        CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        CUDA(cudaEventSynchronize(event));

        // stream: wait for 7, write 9; other: behind stream.
        seen[0] = seen[1] = 0;
        DRIVER(cuStreamWaitValue32((CUstream)stream, at(cell), 7, CU_STREAM_WAIT_VALUE_EQ));
        DRIVER(cuStreamWriteValue32((CUstream)stream, at(cell + 1), 9, 0));
        CUDA(cudaEventRecord(event, stream));
        CUDA(cudaStreamWaitEvent(other, event, 0));
        EXPECT(cudaErrorNotReady, cudaStreamQuery(stream));
        EXPECT(cudaErrorNotReady, cudaStreamQuery(other));
        EXPECT(cudaErrorNotReady, cudaEventQuery(event));
        cudaGetLastError();
        REQUIRE(seen[1] == 0);
        seen[0] = 7;
        CUDA(cudaEventSynchronize(event));
        REQUIRE(seen[1] == 9);
        CUDA(cudaStreamSynchronize(other));

        // A batch: wait until (value & 4) != 0, then two writes.
        CUstreamBatchMemOpParams batch[3] = {};
        batch[0].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
        batch[0].waitValue.address = at(cell);
        batch[0].waitValue.value = 4;
        batch[0].waitValue.flags = CU_STREAM_WAIT_VALUE_AND;
        batch[1].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
        batch[1].writeValue.address = at(cell + 1);
        batch[1].writeValue.value = 11;
        batch[2].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
        batch[2].writeValue.address = at(cell + 2);
        batch[2].writeValue.value64 = 0x100000002;
        seen[0] = 0;
        DRIVER(cuStreamBatchMemOp((CUstream)stream, 3, batch, 0));
        // The stream is destroyed; what it was given still runs.
        CUDA(cudaStreamDestroy(stream));
        seen[0] = 12;
        CUDA(cudaDeviceSynchronize());
        REQUIRE(seen[1] == 11 && seen[2] == 2 && seen[3] == 1);

        // A reset takes streams and events with it, and the next round starts anew.
        CUDA(cudaDeviceReset());
    }
    OK("two rounds, one reset each");
}
