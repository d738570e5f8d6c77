// Breadth-first search level by level, a flag read back after each: levels match a queue's.
#include "check.h"
#include <queue>

__global__ void expand(const int *row, const int *to, int *level, int n, int depth, int *changed)
{
    int v = blockIdx.x * blockDim.x + threadIdx.x;
    if (v >= n || level[v] != depth) return;
    for (int e = row[v]; e < row[v + 1]; e++)
        if (atomicCAS(&level[to[e]], -1, depth + 1) == -1) *changed = 1;
}

int main()
{
    const int n = 20000;
    Random random(19);
    std::vector<int> row{0}, to, level(n, -1), want(n, -1);
    for (int v = 0; v < n; v++) {
        for (int e = random.below(5); e > 0; e--) to.push_back(random.below(n));
        if (v + 1 < n && v % 3) to.push_back(v + 1);
        row.push_back(int(to.size()));
    }
    level[0] = want[0] = 0;
    Device<int> drow(row), dto(to), dlevel(level), changed(1);
    int more = 1, depth = 0;
    for (; more; depth++) {
        CUDA(cudaMemset(changed, 0, sizeof(int)));
        expand<<<(n + 255) / 256, 256>>>(drow, dto, dlevel, n, depth, changed);
        CUDA(cudaMemcpy(&more, changed, sizeof(int), cudaMemcpyDeviceToHost));
    }
    std::queue<int> queue({0});
    for (; !queue.empty(); queue.pop()) {
        int v = queue.front();
        for (int e = row[v]; e < row[v + 1]; e++)
            if (want[to[e]] < 0) want[to[e]] = want[v] + 1, queue.push(to[e]);
    }
    REQUIRE(dlevel.host() == want);
    OK("%d vertices, depth %d", n, depth);
}
