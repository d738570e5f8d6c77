// Warp reductions: shfl down, xor, up and idx, sub-warps, ballots, votes, match, redux.
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

__global__ void warp(const int *in, int *out)
{
    unsigned lane = threadIdx.x % 32;
    int x = in[threadIdx.x];
    int down = x;
    for (int d = 16; d; d /= 2) down += __shfl_down_sync(~0u, down, d);
    int all = x;
    for (int d = 16; d; d /= 2) all += __shfl_xor_sync(~0u, all, d);
    int scan = x;
    for (int d = 1; d < 32; d *= 2) {
        int y = __shfl_up_sync(~0u, scan, d);
        if (lane >= d) scan += y;
    }
    int quarter = x;
    for (int d = 4; d; d /= 2) quarter += __shfl_down_sync(~0u, quarter, d, 8);
    int third = __shfl_sync(~0u, x, 3, 8);
    double wide = __shfl_sync(~0u, double(x) * 0.5, 31);
    int *o = out + threadIdx.x * 12;
    o[0] = __shfl_sync(~0u, down, 0), o[1] = all, o[2] = scan, o[3] = quarter, o[4] = third, o[5] = int(wide * 2);
    o[6] = int(__ballot_sync(~0u, x & 1));
    o[7] = __all_sync(~0u, x >= 0) | __any_sync(~0u, x < 0) << 1;
    o[8] = int(__match_any_sync(~0u, x % 3));
    unsigned mask = 0x00ff00ffu;
    o[9] = (mask >> lane & 1) ? __popc(__ballot_sync(mask, x & 2)) : -1;
#if __CUDA_ARCH__ >= 800
    o[10] = __reduce_add_sync(~0u, x), o[11] = int(__reduce_max_sync(~0u, unsigned(x)));
#else
    namespace cg = cooperative_groups;
    auto tile = cg::tiled_partition<32>(cg::this_thread_block());
    o[10] = cg::reduce(tile, x, cg::plus<int>()), o[11] = cg::reduce(tile, x, cg::greater<int>());
#endif
}

int main()
{
    const int n = 64;
    Random random(5);
    std::vector<int> in(n);
    for (auto &x : in) x = int(random.below(1000));
    Device<int> din(in), dout(n * 12);
    warp<<<1, n>>>(din, dout);
    auto out = dout.host();
    for (int t = 0; t < n; t++) {
        const int *w = &in[t / 32 * 32], *o = &out[t * 12], lane = t % 32;
        int sum = 0, scan = 0, quarter = 0, odd = 0, match = 0, twos = 0, most = 0;
        for (int i = 0; i < 32; i++) {
            sum += w[i], most = std::max(most, w[i]);
            if (i <= lane) scan += w[i];
            odd |= (w[i] & 1) << i;
            match |= (w[i] % 3 == w[lane] % 3) << i;
            if (0x00ff00ffu >> i & 1) twos += w[i] >> 1 & 1;
        }
        for (int i = lane / 8 * 8; i < lane / 8 * 8 + 8; i++) quarter += w[i];
        REQUIRE(o[0] == sum && o[1] == sum && o[2] == scan);
        if (lane % 8 == 0) REQUIRE(o[3] == quarter);
        REQUIRE(o[4] == w[lane / 8 * 8 + 3] && o[5] == w[31]);
        REQUIRE(o[6] == odd && o[7] == 1 && o[8] == match);
        REQUIRE(o[9] == ((0x00ff00ffu >> lane & 1) ? twos : -1));
        REQUIRE(o[10] == sum && o[11] == most);
    }
    OK("%d lanes", n);
}
