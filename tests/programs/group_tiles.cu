// Cooperative groups of several warps of a block: they meet in shared memory that is none of the
// program's own.
// build: -arch=sm_90
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

template <int Size> __global__ void tiles(const int *in, int *out)
{
    __shared__ int own[256];
    int i = threadIdx.x;
    own[i] = -i;
    auto tile = cg::tiled_partition<Size>(cg::this_thread_block());
    int sum = cg::reduce(tile, in[i], cg::plus<int>());
    int most = cg::reduce(tile, in[i], cg::greater<int>());
    bool any = tile.any(in[i] == 99), all = tile.all(in[i] >= 0);
    tile.sync();
    bool kept = own[(i + 1) % 256] == -((i + 1) % 256) || (i + 1) % Size == 0;
    out[i] = kept && all ? (sum * 100 + most) * 2 + any : -1;
}

// Without shared memory of its own, and with some whose size the launch says.
__global__ void halves(const int *in, int *out)
{
    extern __shared__ int late[];
    auto tile = cg::tiled_partition<128>(cg::this_thread_block());
    if (tile.thread_rank() == 0) late[tile.meta_group_rank()] = 7;
    tile.sync();
    out[threadIdx.x] = cg::reduce(tile, in[threadIdx.x], cg::plus<int>()) * late[tile.meta_group_rank()];
}

template <int Size> static void check(const std::vector<int> &in, Device<int> &din, Device<int> &dout)
{
    tiles<Size><<<1, 256>>>(din, dout);
    CUDA(cudaGetLastError());
    auto out = dout.host();
    for (int i = 0; i < 256; i++) {
        int sum = 0, most = 0, any = 0;
        for (int j = i / Size * Size; j < i / Size * Size + Size; j++)
            sum += in[j], most = std::max(most, in[j]), any |= in[j] == 99;
        REQUIRE(out[i] == (sum * 100 + most) * 2 + any);
    }
}

int main()
{
    Random random(71);
    std::vector<int> in(256);
    for (auto &x : in) x = random.below(100);
    Device<int> din(in), dout(256);
    check<64>(in, din, dout);
    check<128>(in, din, dout);
    check<256>(in, din, dout);
    halves<<<1, 256, 2 * sizeof(int)>>>(din, dout);
    CUDA(cudaGetLastError());
    auto out = dout.host();
    for (int i = 0; i < 256; i++) {
        int sum = 0;
        for (int j = i / 128 * 128; j < i / 128 * 128 + 128; j++) sum += in[j];
        REQUIRE(out[i] == sum * 7);
    }
    OK("tiles of 64, 128 and 256 threads");
}
