// Lloyd's k-means with integer points, so that sums and centres are exact.
#include "check.h"

__global__ void assign(const int2 *p, const int2 *centre, int *label, long long *sum, int *count, int n, int k)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    long long best = 1ll << 62;
    int mine = 0;
    for (int c = 0; c < k; c++) {
        long long dx = p[i].x - centre[c].x, dy = p[i].y - centre[c].y, d = dx * dx + dy * dy;
        if (d < best) best = d, mine = c;
    }
    label[i] = mine;
    atomicAdd((unsigned long long *)&sum[2 * mine], (unsigned long long)(long long)p[i].x);
    atomicAdd((unsigned long long *)&sum[2 * mine + 1], (unsigned long long)(long long)p[i].y);
    atomicAdd(&count[mine], 1);
}

__global__ void move(int2 *centre, const long long *sum, const int *count, int k)
{
    int c = threadIdx.x;
    if (c < k && count[c]) centre[c] = {int(sum[2 * c] / count[c]), int(sum[2 * c + 1] / count[c])};
}

int main()
{
    const int n = 5000, k = 7, rounds = 8;
    Random random(20);
    std::vector<int2> p(n), centre(k);
    for (auto &q : p) q = {int(random.below(20001)) - 10000, int(random.below(20001)) - 10000};
    for (int c = 0; c < k; c++) centre[c] = p[c];
    Device<int2> dp(p), dc(centre);
    Device<int> label(n), count(k);
    Device<long long> sum(2 * k);
    for (int r = 0; r < rounds; r++) {
        CUDA(cudaMemset(sum, 0, 16 * k));
        CUDA(cudaMemset(count, 0, 4 * k));
        assign<<<(n + 127) / 128, 128>>>(dp, dc, label, sum, count, n, k);
        move<<<1, 32>>>(dc, sum, count, k);
        std::vector<long long> s(2 * k);
        std::vector<int> m(k);
        for (auto &q : p) {
            long long best = 1ll << 62;
            int mine = 0;
            for (int c = 0; c < k; c++) {
                long long dx = q.x - centre[c].x, dy = q.y - centre[c].y;
                if (dx * dx + dy * dy < best) best = dx * dx + dy * dy, mine = c;
            }
            s[2 * mine] += q.x, s[2 * mine + 1] += q.y, m[mine]++;
        }
        for (int c = 0; c < k; c++)
            if (m[c]) centre[c] = {int(s[2 * c] / m[c]), int(s[2 * c + 1] / m[c])};
    }
    auto got = dc.host();
    for (int c = 0; c < k; c++) REQUIRE(got[c].x == centre[c].x && got[c].y == centre[c].y);
    OK("%d points, %d rounds", n, rounds);
}
