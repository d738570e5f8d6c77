// Cooperative groups: tiles, coalesced groups, partitions, reductions, and a grid-wide barrier.
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cooperative_groups/scan.h>
namespace cg = cooperative_groups;

__global__ void tiles(const int *in, int *out)
{
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<8>(block);
    int i = block.thread_rank(), x = in[i];
    out[4 * i] = cg::reduce(tile, x, cg::plus<int>());
    out[4 * i + 1] = cg::inclusive_scan(tile, x);
    out[4 * i + 2] = -1;
    if (x & 1) {
        auto odd = cg::coalesced_threads();
        out[4 * i + 2] = odd.size() * 100 + odd.thread_rank();
    }
    auto half = cg::tiled_partition<32>(block);
    out[4 * i + 3] = cg::reduce(half, x, cg::greater<int>());
}

// Each step needs every block's result of the one before.
__global__ void smooth(float *a, float *b, int n, int steps)
{
    auto grid = cg::this_grid();
    for (int s = 0; s < steps; s++) {
        for (unsigned i = grid.thread_rank(); i < n; i += grid.size())
            b[i] = (a[(i + n - 1) % n] + a[(i + 1) % n]) * 0.5f;
        grid.sync();
        float *t = a;
        a = b, b = t;
    }
}

int main()
{
    const int m = 96;
    Random random(32);
    std::vector<int> in(m);
    for (auto &x : in) x = random.below(100);
    Device<int> din(in), dout(4 * m);
    tiles<<<1, m>>>(din, dout);
    auto out = dout.host();
    for (int i = 0; i < m; i++) {
        int sum = 0, scan = 0, odd = 0, before = 0, most = 0;
        for (int j = i / 8 * 8; j < i / 8 * 8 + 8; j++) sum += in[j], scan += j <= i ? in[j] : 0;
        for (int j = i / 32 * 32; j < i / 32 * 32 + 32; j++)
            odd += in[j] & 1, before += j < i && (in[j] & 1), most = std::max(most, in[j]);
        REQUIRE(out[4 * i] == sum && out[4 * i + 1] == scan && out[4 * i + 3] == most);
        REQUIRE(out[4 * i + 2] == (in[i] & 1 ? odd * 100 + before : -1));
    }

    int n = 2048, steps = 20, supported, per;
    CUDA(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, 0));
    REQUIRE(supported);
    CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per, smooth, 64, 0));
    cudaDeviceProp device;
    CUDA(cudaGetDeviceProperties(&device, 0));
    int blocks = std::min(16, per * device.multiProcessorCount);
    std::vector<float> a(n), b(n);
    for (auto &x : a) x = float(random.below(1 << 10));
    Device<float> da(a), db(n);
    float *pa = da, *pb = db;
    void *args[] = {&pa, &pb, &n, &steps};
    CUDA(cudaLaunchCooperativeKernel((void *)smooth, blocks, 64, args, 0, 0));
    CUDA(cudaDeviceSynchronize());
    for (int s = 0; s < steps; s++, a.swap(b))
        for (int i = 0; i < n; i++) b[i] = (a[(i + n - 1) % n] + a[(i + 1) % n]) * 0.5f;
    REQUIRE(da.host() == a);
    EXPECT(cudaErrorCooperativeLaunchTooLarge, cudaLaunchCooperativeKernel((void *)smooth, 10000000, 64, args, 0, 0));
    (void)cudaGetLastError();
    OK("%d blocks, %d grid barriers", blocks, steps);
}
