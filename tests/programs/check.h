// What every test program uses: error checks, a generator with a known sequence, the closing line.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "nonce.h"

// A CUDA call that must succeed.
#define CUDA(call)                                                                             \
    do {                                                                                       \
        cudaError_t status_ = (call);                                                          \
        if (status_ != cudaSuccess) {                                                          \
            std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                          \
                        cudaGetErrorName(status_));                                            \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

// A CUDA call that must fail with exactly this error.
#define EXPECT(error, call)                                                                    \
    do {                                                                                       \
        cudaError_t status_ = (call);                                                          \
        if (status_ != (error)) {                                                              \
            std::printf("%s:%d: %s: %s, not %s\n", __FILE__, __LINE__, #call,                  \
                        cudaGetErrorName(status_), #error);                                    \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

// A driver API call that must succeed (for programs that include cuda.h).
#define DRIVER(call)                                                                           \
    do {                                                                                       \
        int status_ = (int)(call);                                                             \
        if (status_ != 0) {                                                                    \
            std::printf("%s:%d: %s: CUresult %d\n", __FILE__, __LINE__, #call, status_);       \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

// Loads a kernel now: a lazy load waits for the device, which another kernel may keep busy.
#define PRELOAD(kernel)                                                                        \
    do {                                                                                       \
        cudaFuncAttributes attributes_;                                                        \
        CUDA(cudaFuncGetAttributes(&attributes_, kernel));                                     \
    } while (0)

// A condition that must hold.
#define REQUIRE(condition)                                                                     \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (0)

// The last line that the runner looks for.
#define OK(...)                                                                                \
    do {                                                                                       \
        std::printf("ok ");                                                                    \
        std::printf(__VA_ARGS__);                                                              \
        std::printf("\n");                                                                     \
        return 0;                                                                              \
    } while (0)

// Numerical Recipes' 64-bit linear congruential generator, top bits: the same on every machine.
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15ull + 1) {}
    uint32_t next()
    {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return uint32_t(state >> 32);
    }
    float uniform() { return float(next() >> 8) * (1.0f / 16777216.0f); }
    uint32_t below(uint32_t n) { return uint32_t((uint64_t(next()) * n) >> 32); }
};

inline bool close(double got, double want, double tolerance)
{
    return std::fabs(got - want) <= tolerance * (1.0 + std::fabs(want));
}

// A device array that goes with its scope.
template <typename T> struct Device {
    T *data = nullptr;
    size_t count;
    explicit Device(size_t n) : count(n) { CUDA(cudaMalloc(&data, n * sizeof(T))); }
    explicit Device(const std::vector<T> &host) : Device(host.size())
    {
        CUDA(cudaMemcpy(data, host.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    ~Device() { cudaFree(data); }
    operator T *() { return data; }
    std::vector<T> host() const
    {
        std::vector<T> out(count);
        CUDA(cudaMemcpy(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
        return out;
    }
};
