// cp.async pipelines and shared-memory barriers (mbarrier) with cuda::pipeline and cuda::barrier.
// build: -arch=sm_80
#include "check.h"
#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;
#pragma nv_diag_suppress static_var_with_dynamic_init

const int Tile = 128;

__global__ void pipelined(const int *in, long long *out, int tiles)
{
    __shared__ __align__(16) int buffer[2][Tile];
    auto block = cg::this_thread_block();
    auto pipe = cuda::make_pipeline();
    long long sum = 0;
    for (int t = 0; t < tiles + 1; t++) {
        if (t < tiles) {
            pipe.producer_acquire();
            cuda::memcpy_async(&buffer[t % 2][threadIdx.x], &in[t * Tile + threadIdx.x], sizeof(int), pipe);
            pipe.producer_commit();
        }
        if (t > 0) {
            if (t < tiles) cuda::pipeline_consumer_wait_prior<1>(pipe);
            else cuda::pipeline_consumer_wait_prior<0>(pipe);
            block.sync();
            sum += buffer[(t - 1) % 2][(threadIdx.x * 7 + 3) % Tile];
            pipe.consumer_release();
            block.sync();
        }
    }
    atomicAdd((unsigned long long *)out, (unsigned long long)sum);
}

__global__ void barriers(int *out, int rounds)
{
    __shared__ cuda::barrier<cuda::thread_scope_block> bar;
    __shared__ int cell[Tile];
    if (threadIdx.x == 0) init(&bar, blockDim.x);
    __syncthreads();
    int x = threadIdx.x;
    for (int r = 0; r < rounds; r++) {
        cell[threadIdx.x] = x;
        bar.arrive_and_wait();
        x = cell[(threadIdx.x + 1) % blockDim.x] + 1;
        bar.arrive_and_wait();
    }
    out[threadIdx.x] = x;
}

int main()
{
    const int tiles = 20, rounds = 9;
    std::vector<int> in(tiles * Tile);
    long long want = 0;
    Random random(41);
    for (auto &x : in) want += x = random.below(1000);
    Device<int> din(in), out(Tile);
    Device<long long> sum(1);
    CUDA(cudaMemset(sum, 0, 8));
    pipelined<<<1, Tile>>>(din, sum, tiles);
    CUDA(cudaDeviceSynchronize());
    REQUIRE(sum.host()[0] == want);
    barriers<<<1, Tile>>>(out, rounds);
    auto got = out.host();
    for (int i = 0; i < Tile; i++) REQUIRE(got[i] == (i + rounds) % Tile + rounds);
    OK("%d tiles, %d rounds", tiles, rounds);
}
