// Kernels with one mistake each, and some without; the comment on its line names what is found
// there. Usage: checked CASE
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>

#define THREADS 128

// Memory.

__global__ void past_the_end(int *memory, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= count) memory[i] = i; // past_the_end
}

__global__ void misaligned(char *memory)
{
    *(int *)(memory + threadIdx.x + 1) = 7; // misaligned
}

__global__ void freed(int *memory)
{
    memory[threadIdx.x] = 1; // freed
}

__global__ void local(int *out, int index)
{
    volatile int mine[16];
    for (int i = 0; i < 16; ++i) mine[i] = i;
    *out = mine[index]; // local
}

__global__ void dynamic_shared(int *out, int index)
{
    extern __shared__ int asked[];
    asked[threadIdx.x] = index;
    __syncthreads();
    if (threadIdx.x == 0) *out = asked[index]; // dynamic_shared
}

// Races.

__global__ void block_race(int *out)
{
    __shared__ int sums[THREADS];
    sums[threadIdx.x] = threadIdx.x + *out; // block_race_write
    if (threadIdx.x == 0) {
        int sum = 0;
#pragma unroll 1
        for (int i = 0; i < THREADS; ++i) sum += sums[i]; // block_race
        *out = sum;
    }
}

__global__ void warp_race(int *out)
{
    __shared__ int sums[THREADS];
    __shared__ int parts[THREADS / 32];
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    sums[threadIdx.x] = threadIdx.x + *out; // warp_race_write
    if (lane == 0) {
        int sum = 0;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) sum += sums[warp * 32 + i]; // warp_race
        parts[warp] = sum;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (unsigned i = 0; i < THREADS / 32; ++i) sum += parts[i];
        *out = sum;
    }
}

__global__ void next_round(int *out)
{
    __shared__ int value;
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
        if (threadIdx.x == 0) value = i + *out; // next_round_write
        __syncthreads();
        sum += value; // next_round
    }
    out[threadIdx.x + 1] = sum;
}

__global__ void two_writers(int *out)
{
    __shared__ int last;
    last = threadIdx.x; // two_writers
    __syncthreads();
    *out = last;
}

__device__ int ordered_in_turns(int *sums, int *flag)
{
    // By an atomic flag with fences.
    if (threadIdx.x == 32) {
        sums[0] = 5;
        __threadfence_block();
        atomicExch(flag, 1);
    }
    int got = 0;
    if (threadIdx.x == 64) {
        while (atomicAdd(flag, 0) == 0) {}
        __threadfence_block();
        got = sums[0];
    }
    return got;
}

__global__ void no_race(int *out)
{
    __shared__ int sums[THREADS];
    __shared__ int flag, same;
    unsigned warp = threadIdx.x / 32;
    if (threadIdx.x == 0) flag = 0;
    same = 3; // Everybody writes the same.
    sums[threadIdx.x] = threadIdx.x + *out;
    __syncwarp();
    int sum = sums[warp * 32 + (threadIdx.x + 1) % 32];
    __syncthreads();
    for (int step = THREADS / 2; step > 0; step /= 2) {
        if (threadIdx.x < step) sums[threadIdx.x] += sums[threadIdx.x + step];
        __syncthreads();
    }
    atomicAdd(&sums[1], sum);
    __syncthreads();
    int total = sums[1] + same;
    __syncthreads();
    total += ordered_in_turns(sums, &flag);
    // A barrier of two of the warps.
    if (warp < 2) {
        if (warp == 0) sums[64 + threadIdx.x] = total;
        asm volatile("bar.sync 1, 64;" ::: "memory");
        if (warp == 1) total += sums[32 + threadIdx.x];
    }
    out[threadIdx.x + 1] = total;
}

// What nobody has written.

__global__ void adds(int *to, const int *from, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = from[i] + 1; // adds
}

__global__ void unwritten_shared(int *out)
{
    __shared__ int some[THREADS];
    if (threadIdx.x < THREADS / 2) some[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = some[threadIdx.x]; // unwritten_shared
}

// Barriers.

__global__ void divergent(int *out)
{
    __shared__ int value[THREADS];
    value[threadIdx.x] = *out;
    if (threadIdx.x < THREADS / 2) {
        __syncthreads(); // divergent
        out[threadIdx.x + 1] = value[THREADS - 1 - threadIdx.x];
    }
    value[threadIdx.x] += 1;
    __syncthreads(); // divergent_other
}

__global__ void stuck(int *out)
{
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;" ::: "memory"); // stuck
    }
    *out = 1;
}

__global__ void illegal_syncwarp(int *out)
{
    if (threadIdx.x % 32 < 16) __syncwarp(0xffff0000); // illegal_syncwarp
    *out = 1;
}

static int *allocated(size_t bytes)
{
    int *memory;
    if (cudaMalloc(&memory, bytes)) exit(2);
    return memory;
}

static int *zeros(size_t bytes)
{
    int *memory = allocated(bytes);
    if (cudaMemset(memory, 0, bytes)) exit(2);
    return memory;
}

static void on_init(const char *name)
{
    const int count = 1000;
    int *from = allocated(count * sizeof(int)), *to = allocated(count * sizeof(int));
    if (!strcmp(name, "memset_error")) cudaMemset(from, 0, count);
    if (!strcmp(name, "all_written")) {
        int *other = zeros(count * sizeof(int));
        cudaMemcpy(from, other, count * sizeof(int), cudaMemcpyDeviceToDevice);
        adds<<<8, THREADS>>>(to, from, count);
        cudaMemcpyAsync(to + 500, from, 2000, cudaMemcpyDeviceToDevice);
        from = to;
    }
    adds<<<8, THREADS>>>(to, from, count);
}

int main(int, char **arguments)
{
    const char *name = arguments[1];
    auto is = [&](const char *other) { return !strcmp(name, other); };
    if (is("past_the_end")) past_the_end<<<8, THREADS>>>(allocated(1001 * 4), 1001);
    if (is("misaligned")) misaligned<<<1, 1>>>((char *)allocated(64));
    if (is("freed")) {
        int *memory = allocated(4096);
        cudaFree(memory);
        freed<<<1, 32>>>(memory);
    }
    if (is("local")) local<<<1, 1>>>(allocated(4), 1 << 20);
    if (is("dynamic_shared")) dynamic_shared<<<1, 25, 100>>>(allocated(4), 25);
    // What was freed must not be there again.
    int *out = is("freed") ? nullptr : zeros(4096);
    if (is("block_race")) block_race<<<1, THREADS>>>(out);
    if (is("warp_race")) warp_race<<<1, THREADS>>>(out);
    if (is("next_round")) next_round<<<1, THREADS>>>(out);
    if (is("two_writers")) two_writers<<<1, THREADS>>>(out);
    if (is("no_race")) no_race<<<2, THREADS>>>(out);
    if (is("memset_error") || is("all_written")) on_init(name);
    if (is("unwritten_shared")) unwritten_shared<<<1, THREADS>>>(out);
    if (is("unused")) allocated(12345);
    if (is("divergent")) divergent<<<1, THREADS>>>(out);
    if (is("stuck")) stuck<<<1, THREADS>>>(out);
    if (is("illegal_syncwarp")) illegal_syncwarp<<<1, 32>>>(out);
    printf("%s\n", cudaGetErrorName(cudaDeviceSynchronize()));
}
