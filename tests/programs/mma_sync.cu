// mma.sync and ldmatrix by inline PTX, with the fragment layouts of the PTX reference.
// build: -arch=sm_80
#include "check.h"
#include <cuda_fp16.h>

// C (16x8) = A (16x16) B (16x8), A row-major and B column-major in shared memory.
__global__ void m16n8k16(const __half *a, const __half *b, float *c)
{
    __shared__ __align__(16) __half sa[16 * 16], sb[8 * 16];
    int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) sa[i] = a[i];
    for (int i = lane; i < 128; i += 32) sb[i] = b[i];
    __syncwarp();
    unsigned ra[4], rb[2];
    unsigned pa = __cvta_generic_to_shared(&sa[(lane % 16) * 16 + lane / 16 * 8]);
    unsigned pb = __cvta_generic_to_shared(&sb[(lane % 8) * 16 + lane / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
    float d[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    int row = lane / 4, col = lane % 4 * 2;
    c[row * 8 + col] = d[0], c[row * 8 + col + 1] = d[1];
    c[(row + 8) * 8 + col] = d[2], c[(row + 8) * 8 + col + 1] = d[3];
}

// C (8x8) = A (8x4) B (4x8) in double precision.
__global__ void m8n8k4(const double *a, const double *b, double *c)
{
    int lane = threadIdx.x;
    double d0 = 0, d1 = 0;
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                 : "+d"(d0), "+d"(d1) : "d"(a[lane / 4 * 4 + lane % 4]), "d"(b[lane / 4 * 4 + lane % 4]));
    c[lane / 4 * 8 + lane % 4 * 2] = d0, c[lane / 4 * 8 + lane % 4 * 2 + 1] = d1;
}

// C (16x8) = A (16x32) B (32x8), bytes to ints; A row-major, B column-major in registers.
__global__ void m16n8k32(const int *a, const int *b, int *c)
{
    int lane = threadIdx.x, g = lane / 4, t = lane % 4, d[4] = {0, 0, 0, 0};
    int ra[4] = {a[g * 8 + t], a[(g + 8) * 8 + t], a[g * 8 + t + 4], a[(g + 8) * 8 + t + 4]};
    int rb[2] = {b[g * 8 + t], b[g * 8 + t + 4]};
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    c[g * 8 + 2 * t] = d[0], c[g * 8 + 2 * t + 1] = d[1];
    c[(g + 8) * 8 + 2 * t] = d[2], c[(g + 8) * 8 + 2 * t + 1] = d[3];
}

int main()
{
    Random random(34);
    auto small = [&] { return int(random.below(15)) - 7; };
    {
        std::vector<__half> a(256), b(128);
        for (auto &x : a) x = __half(float(small()));
        for (auto &x : b) x = __half(float(small()));
        Device<__half> da(a), db(b);
        Device<float> dc(128);
        m16n8k16<<<1, 32>>>(da, db, dc);
        auto c = dc.host();
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                float sum = 0;
                for (int k = 0; k < 16; k++) sum += float(a[i * 16 + k]) * float(b[j * 16 + k]);
                REQUIRE(c[i * 8 + j] == sum);
            }
    }
    {
        std::vector<double> a(32), b(32);
        for (auto &x : a) x = small();
        for (auto &x : b) x = small();
        Device<double> da(a), db(b), dc(64);
        m8n8k4<<<1, 32>>>(da, db, dc);
        auto c = dc.host();
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++) {
                double sum = 0;
                for (int k = 0; k < 4; k++) sum += a[i * 4 + k] * b[j * 4 + k];
                REQUIRE(c[i * 8 + j] == sum);
            }
    }
    {
        std::vector<signed char> a(512), b(256);
        for (auto &x : a) x = random.next();
        for (auto &x : b) x = random.next();
        Device<signed char> da(a), db(b);
        Device<int> dc(128);
        m16n8k32<<<1, 32>>>((const int *)da.data, (const int *)db.data, dc);
        auto c = dc.host();
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 8; j++) {
                int sum = 0;
                for (int k = 0; k < 32; k++) sum += a[i * 32 + k] * b[j * 32 + k];
                REQUIRE(c[i * 8 + j] == sum);
            }
    }
    OK("f16, f64, s8");
}
