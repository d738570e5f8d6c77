// If one call returned before another began, on whatever thread, the device sees that order.
// build: -Xcompiler -pthread
#include "check.h"
#include <atomic>
#include <thread>

__global__ void multiply_add(unsigned *p, unsigned a, unsigned b) { *p = *p * a + b; }

int main()
{
    const int threads = 4, rounds = 500;
    Device<unsigned> d(1);
    CUDA(cudaMemset(d, 0, 4));
    cudaStream_t s;
    CUDA(cudaStreamCreate(&s));
    CUDA(cudaDeviceSynchronize());
    std::atomic<int> turn{0};
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; t++)
        pool.emplace_back([&, t] {
            for (int r = 0; r < rounds; r++) {
                int mine = r * threads + t;
                while (turn.load() != mine) std::this_thread::yield();
                multiply_add<<<1, 1, 0, s>>>(d, 3u, unsigned(mine));
                turn.store(mine + 1);
            }
        });
    for (auto &t : pool) t.join();
    CUDA(cudaStreamSynchronize(s));
    unsigned want = 0;
    for (int i = 0; i < threads * rounds; i++) want = want * 3 + i;
    REQUIRE(d.host()[0] == want);
    OK("%d launches from %d threads", threads * rounds, threads);
}
