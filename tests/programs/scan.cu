// Exclusive scan of any length in three passes: blocks, block sums, add back.
#include "check.h"

const int Block = 256;

__global__ void scan_blocks(const unsigned *in, unsigned *out, unsigned *sums, int n)
{
    __shared__ unsigned s[2 * Block];
    int t = threadIdx.x, base = blockIdx.x * 2 * Block;
    s[2 * t] = base + 2 * t < n ? in[base + 2 * t] : 0;
    s[2 * t + 1] = base + 2 * t + 1 < n ? in[base + 2 * t + 1] : 0;
    int offset = 1;
    for (int d = Block; d > 0; d >>= 1, offset *= 2) {
        __syncthreads();
        if (t < d) s[offset * (2 * t + 2) - 1] += s[offset * (2 * t + 1) - 1];
    }
    if (t == 0) sums[blockIdx.x] = s[2 * Block - 1], s[2 * Block - 1] = 0;
    for (int d = 1; d <= Block; d *= 2) {
        offset >>= 1;
        __syncthreads();
        if (t < d) {
            int a = offset * (2 * t + 1) - 1, b = offset * (2 * t + 2) - 1;
            unsigned x = s[a];
            s[a] = s[b], s[b] += x;
        }
    }
    __syncthreads();
    if (base + 2 * t < n) out[base + 2 * t] = s[2 * t];
    if (base + 2 * t + 1 < n) out[base + 2 * t + 1] = s[2 * t + 1];
}

__global__ void add_back(unsigned *out, const unsigned *sums, int n)
{
    int i = blockIdx.x * 2 * Block + threadIdx.x;
    for (int j = 0; j < 2; j++, i += Block)
        if (i < n) out[i] += sums[blockIdx.x];
}

static void scan(const unsigned *in, unsigned *out, int n)
{
    int blocks = (n + 2 * Block - 1) / (2 * Block);
    Device<unsigned> sums(blocks), scanned(blocks);
    scan_blocks<<<blocks, Block>>>(in, out, sums, n);
    if (blocks == 1) return;
    scan(sums, scanned, blocks);
    add_back<<<blocks, Block>>>(out, scanned, n);
}

int main()
{
    Random random(6);
    for (int n : {1, 511, 512, 513, 300001}) {
        std::vector<unsigned> in(n);
        for (auto &x : in) x = random.below(100);
        Device<unsigned> din(in), dout(n);
        scan(din, dout, n);
        auto out = dout.host();
        unsigned want = 0;
        for (int i = 0; i < n; i++) {
            REQUIRE(out[i] == want);
            want += in[i];
        }
    }
    OK("five lengths");
}
