// Warpgroup products: f16 from swizzled shared memory with B by k and by n, A from registers, bytes
// without a swizzle.
// build: -gencode arch=compute_90a,code=compute_90a
#include "check.h"
#include <cuda_fp16.h>

const int M = 64, N = 32;

__device__ uint64_t descriptor(const void *p, int leading, int stride, uint64_t mode)
{
    uint64_t address = __cvta_generic_to_shared(p);
    return (address & 0x3FFFF) >> 4 | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | mode << 62;
}

__device__ void fence() { asm volatile("fence.proxy.async.shared::cta; wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ void finish() { asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

#define SUMS(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
                "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
#define D16 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}"

template <typename T> __device__ void put(T *c, const T *d)
{
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    for (int i = 0; i < 16; i++) c[(row + i / 2 % 2 * 8) * N + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2] = d[i];
}

// C = A B over k of 64; A row by row, 128 bytes swizzled; B by columns (`n` major or not).
template <int Major> __global__ void halves(const __half *a, const __half *b, float *c)
{
    __shared__ __align__(1024) char sa[M * 128], sb[64 * 128];
    for (int i = threadIdx.x; i < M * 64; i += 128) {
        int row = i / 64, at = i % 64 * 2;
        *(__half *)&sa[row * 128 + (at ^ row % 8 * 16)] = a[i];
    }
    for (int i = threadIdx.x; i < 64 * N; i += 128) {
        int k = i / N, n = i % N;
        if (Major) *(__half *)&sb[k * 64 + ((n * 2) ^ k / 2 % 4 * 16)] = b[i];  // rows of 64 bytes
        else *(__half *)&sb[n * 128 + ((k * 2) ^ n % 8 * 16)] = b[i];
    }
    __syncthreads();
    float d[16];
    for (auto &x : d) x = 7;
    fence();
    for (int k = 0; k < 4; k++) {
        uint64_t da = descriptor(sa + k * 32, 16, 1024, 1);
        uint64_t db = Major ? descriptor(sb + k * 16 * 64, 4096, 512, 2) : descriptor(sb + k * 32, 16, 1024, 1);
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %18, 0;"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " D16 ", %16, %17, p, 1, 1, 0, %19; }"
                     : SUMS(d) : "l"(da), "l"(db), "r"(k), "n"(Major));
    }
    finish();
    put(c, d);
}

// C = -A B over k of 16; A in registers, B by k without a swizzle.
__global__ void registers(const __half *a, const __half *b, float *c)
{
    __shared__ __align__(128) char sb[N * 32];
    for (int i = threadIdx.x; i < 16 * N; i += 128) {
        int k = i / N, n = i % N;
        *(__half *)&sb[k / 8 * (N * 16) + n / 8 * 128 + n % 8 * 16 + k % 8 * 2] = b[i];
    }
    __syncthreads();
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    unsigned r[4];
    for (int i = 0; i < 4; i++) r[i] = *(const unsigned *)&a[(row + i % 2 * 8) * 16 + t * 2 + i / 2 * 8];
    float d[16] = {};
    fence();
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 " D16 ", {%16,%17,%18,%19}, %20, p, -1, 1, 0; }"
                 : SUMS(d) : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "l"(descriptor(sb, N * 16, 128, 0)));
    finish();
    put(c, d);
}

#define INTS(d) "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), \
                "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15])

// C = A B over k of 32 bytes, both without a swizzle.
__global__ void bytes(const signed char *a, const unsigned char *b, int *c)
{
    __shared__ __align__(128) char sa[M * 32], sb[N * 32];
    for (int i = threadIdx.x; i < M * 32; i += 128) {
        int m = i / 32, k = i % 32;
        sa[k / 16 * (M * 16) + m / 8 * 128 + m % 8 * 16 + k % 16] = a[i];
    }
    for (int i = threadIdx.x; i < N * 32; i += 128) {
        int k = i / N, n = i % N;
        sb[k / 16 * (N * 16) + n / 8 * 128 + n % 8 * 16 + k % 16] = b[i];
    }
    __syncthreads();
    int d[16] = {};
    fence();
    asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n32k32.s32.s8.u8 " D16 ", %16, %17, p; }"
                 : INTS(d) : "l"(descriptor(sa, M * 16, 128, 0)), "l"(descriptor(sb, N * 16, 128, 0)));
    finish();
    put(c, d);
}

template <typename A, typename B, typename C> bool product(const std::vector<A> &a, const std::vector<B> &b, const std::vector<C> &c, int k, int sign)
{
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            C sum = 0;
            for (int l = 0; l < k; l++) sum += C(float(a[i * k + l])) * C(float(b[l * N + j]));
            if (c[i * N + j] != sum * sign) return false;
        }
    return true;
}

int main()
{
    Random random(90);
    auto halves_of = [&](int n) {
        std::vector<__half> v(n);
        for (auto &x : v) x = __half(float(int(random.below(15)) - 7));
        return v;
    };
    auto a = halves_of(M * 64), b = halves_of(64 * N), a16 = halves_of(M * 16), b16 = halves_of(16 * N);
    Device<__half> da(a), db(b), da16(a16), db16(b16);
    Device<float> dc(M * N);
    halves<0><<<1, 128>>>(da, db, dc);
    REQUIRE(product(a, b, dc.host(), 64, 1));
    halves<1><<<1, 128>>>(da, db, dc);
    REQUIRE(product(a, b, dc.host(), 64, 1));
    registers<<<1, 128>>>(da16, db16, dc);
    REQUIRE(product(a16, b16, dc.host(), 16, -1));
    std::vector<signed char> s(M * 32);
    std::vector<unsigned char> u(32 * N);
    for (auto &x : s) x = random.next();
    for (auto &x : u) x = random.next();
    Device<signed char> ds(s);
    Device<unsigned char> du(u);
    Device<int> di(M * N);
    bytes<<<1, 128>>>(ds, du, di);
    REQUIRE(product(s, u, di.host(), 32, 1));
    OK("f16, s8");
}
