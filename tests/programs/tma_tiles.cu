// Tensor copies (TMA): tiles of a matrix are loaded with a 128-byte swizzle, transposed and stored
// by tensor maps that are kernel parameters; edges are filled with zeros and cut; a load is
// multicast to a cluster.
// build: -gencode arch=compute_90,code=compute_90 {cuda}
#include "check.h"
#include <cuda.h>

const int Tile = 32, Rows = 70, Columns = 100;

__device__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

__device__ void begin(uint64_t *bar, unsigned bytes)
{
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(bar)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes));
}

__device__ void finish(uint64_t *bar)
{
    unsigned done = 0;
    while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(shared_address(bar)) : "memory");
}

__global__ void transpose(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to)
{
    __shared__ __align__(1024) float in[Tile * Tile], out[Tile * Tile];
    __shared__ uint64_t bar;
    int x = blockIdx.x * Tile, y = blockIdx.y * Tile, t = threadIdx.x;
    if (t == 0) {
        asm volatile("prefetch.tensormap [%0];" ::"l"(&from));
        begin(&bar, sizeof in);
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                     ::"r"(shared_address(in)), "l"(&from), "r"(x), "r"(y), "r"(shared_address(&bar)) : "memory");
    }
    __syncthreads();
    finish(&bar);
    for (int r = 0; r < Tile; r++)
        out[t * Tile + r] = in[r * Tile + ((t / 4) ^ (r % 8)) * 4 + t % 4];  // 16-byte chunks are swizzled
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    if (t == 0) {
        asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                     ::"l"(&to), "r"(y), "r"(x), "r"(shared_address(out)) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}

// Rank 0 of a cluster of two loads a tile for both.
__global__ __cluster_dims__(2) void multicast(const __grid_constant__ CUtensorMap from, float *sums)
{
    __shared__ __align__(1024) float in[Tile * Tile];
    __shared__ uint64_t bar;
    int t = threadIdx.x;
    if (t == 0) begin(&bar, sizeof in);
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
    if (t == 0 && blockIdx.x == 0)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%2, %3}], [%4], %5;"
                     ::"r"(shared_address(in)), "l"(&from), "r"(0), "r"(0), "r"(shared_address(&bar)), "h"((short)3) : "memory");
    finish(&bar);
    float sum = 0;
    for (int r = 0; r < Tile; r++) sum += in[r * Tile + t];
    sums[blockIdx.x * Tile + t] = sum;
    asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
}

static CUtensorMap plane(float *data, uint64_t width, uint64_t height, CUtensorMapSwizzle swizzle)
{
    CUtensorMap map;
    cuuint64_t size[] = {width, height}, stride[] = {width * sizeof(float)};
    cuuint32_t box[] = {Tile, Tile}, step[] = {1, 1};
    DRIVER(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                  swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
    REQUIRE(cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 6, data, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_ERROR_INVALID_VALUE);
    return map;
}

int main()
{
    const int Height = 72;  // a transposed row is a multiple of 16 bytes
    std::vector<float> a(Columns * Height, 0);
    for (int i = 0; i < Columns * Rows; i++) a[i] = float(i + 1);
    Device<float> da(a), db(std::vector<float>(Columns * Height, -1)), sums(2 * Tile);
    CUtensorMap from = plane(da, Columns, Height, CU_TENSOR_MAP_SWIZZLE_128B), to = plane(db, Height, Columns, CU_TENSOR_MAP_SWIZZLE_NONE);
    transpose<<<dim3((Columns + Tile - 1) / Tile, (Height + Tile - 1) / Tile), Tile>>>(from, to);
    CUDA(cudaDeviceSynchronize());
    auto b = db.host();
    for (int r = 0; r < Height; r++)
        for (int c = 0; c < Columns; c++) REQUIRE(b[c * Height + r] == a[r * Columns + c]);
    multicast<<<2, Tile>>>(plane(da, Columns, Height, CU_TENSOR_MAP_SWIZZLE_NONE), sums);
    CUDA(cudaDeviceSynchronize());
    auto s = sums.host();
    for (int t = 0; t < Tile; t++) {
        float sum = 0;
        for (int r = 0; r < Tile; r++) sum += a[r * Columns + t];
        REQUIRE(s[t] == sum && s[Tile + t] == sum);
    }
    OK("%d x %d transposed", Height, Columns);
}
