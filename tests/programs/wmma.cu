// Tensor-core products by the wmma interface: half to float, half to half, bf16, int8, double.
// build: -arch=sm_80
#include "check.h"
#include <cuda_bf16.h>
#include <mma.h>
using namespace nvcuda;

template <typename T, typename Acc, int M, int N, int K, typename LA, typename LB>
__global__ void product(const T *a, const T *b, Acc *c)
{
    wmma::fragment<wmma::matrix_a, M, N, K, T, LA> fa;
    wmma::fragment<wmma::matrix_b, M, N, K, T, LB> fb;
    wmma::fragment<wmma::accumulator, M, N, K, Acc> fc;
    wmma::fill_fragment(fc, Acc(1));
    wmma::load_matrix_sync(fa, a, std::is_same<LA, wmma::row_major>::value ? K : M);
    wmma::load_matrix_sync(fb, b, std::is_same<LB, wmma::row_major>::value ? N : K);
    wmma::mma_sync(fc, fa, fb, fc);
    for (int i = 0; i < fc.num_elements; i++) fc.x[i] = fc.x[i] + fc.x[i];
    wmma::store_matrix_sync(c, fc, N, wmma::mem_row_major);
}

template <typename T, typename Acc, int M, int N, int K, typename LA, typename LB> static void test()
{
    Random random(M * 100 + N * 10 + K);
    std::vector<T> a(M * K), b(K * N);
    std::vector<int> ia(M * K), ib(K * N);
    for (int i = 0; i < M * K; i++) a[i] = T(float(ia[i] = int(random.below(9)) - 4));
    for (int i = 0; i < K * N; i++) b[i] = T(float(ib[i] = int(random.below(9)) - 4));
    Device<T> da(a), db(b);
    Device<Acc> dc(M * N);
    product<T, Acc, M, N, K, LA, LB><<<1, 32>>>(da, db, dc);
    CUDA(cudaGetLastError());
    auto c = dc.host();
    bool ra = std::is_same<LA, wmma::row_major>::value, rb = std::is_same<LB, wmma::row_major>::value;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            int sum = 1;
            for (int k = 0; k < K; k++) sum += ia[ra ? i * K + k : k * M + i] * ib[rb ? k * N + j : j * K + k];
            REQUIRE(float(c[i * N + j]) == 2.0f * sum);
        }
}

int main()
{
    using R = wmma::row_major;
    using C = wmma::col_major;
    test<__half, float, 16, 16, 16, R, C>();
    test<__half, float, 16, 16, 16, C, R>();
    test<__half, __half, 16, 16, 16, R, R>();
    test<__half, float, 32, 8, 16, R, R>();
    test<__half, float, 8, 32, 16, C, C>();
    test<__nv_bfloat16, float, 16, 16, 16, R, C>();
    test<signed char, int, 16, 16, 16, R, C>();
    test<signed char, int, 32, 8, 16, C, R>();
    test<double, double, 8, 8, 4, R, C>();
    OK("nine shapes");
}
