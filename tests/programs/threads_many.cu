// Eight host threads allocate, copy, launch and free at once.
// build: -Xcompiler -pthread
#include "check.h"
#include <thread>

__global__ void scale(int *p, int n, int by)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) p[i] *= by;
}

int main()
{
    std::vector<std::thread> pool;
    for (int t = 0; t < 8; t++)
        pool.emplace_back([t] {
            Random random(t);
            for (int round = 0; round < 20; round++) {
                int n = 1 + random.below(20000);
                std::vector<int> v(n);
                for (int i = 0; i < n; i++) v[i] = i + t;
                Device<int> d(v);
                scale<<<(n + 127) / 128, 128>>>(d, n, round);
                auto got = d.host();
                for (int i = 0; i < n; i++) REQUIRE(got[i] == (i + t) * round);
            }
        });
    for (auto &t : pool) t.join();
    OK("8 threads, 20 rounds");
}
