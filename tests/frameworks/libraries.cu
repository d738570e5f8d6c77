// The CUDA libraries through their C interfaces, on every kind of stream, each result compared with
// the host's. Built with -lcublas -lcufft -lcurand -lcusparse -lcusolver -lnvrtc -lcuda.
#include "../programs/check.h"
#include <complex>

#include <cublas_v2.h>
#include <cuda.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cufft.h>
#include <curand.h>
#include <cusolverDn.h>
#include <cusparse.h>
#include <nvrtc.h>

#define GOOD(call)                                                             \
    do {                                                                       \
        auto status = call;                                                    \
        if (int(status) != 0) {                                                \
            std::printf("%s:%d: %s gave %d\n", __FILE__, __LINE__, #call, int(status)); \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)

template <class T> T *on_device(const std::vector<T> &host) {
    T *device;
    GOOD(cudaMalloc(&device, host.size() * sizeof(T)));
    GOOD(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    return device;
}

template <class T> std::vector<T> on_host(const T *device, size_t count) {
    std::vector<T> host(count);
    GOOD(cudaDeviceSynchronize());
    GOOD(cudaMemcpy(host.data(), device, count * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
}

std::vector<float> ramp(size_t count, int period) {
    std::vector<float> values(count);
    for (size_t i = 0; i < count; i++) values[i] = float(int(i % period) - period / 2) / period;
    return values;
}

void products(cublasHandle_t blas, int n) {
    auto a = ramp(n * n, 17), b = ramp(n * n, 13);
    float *da = on_device(a), *db = on_device(b), *dc = on_device(std::vector<float>(n * n)), one = 1, zero = 0;
    GOOD(cublasSgemm(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, da, n, db, n, &zero, dc, n));
    auto c = on_host(dc, n * n);
    for (int at : {0, n + 1, n * n - 1}) {
        double expected = 0;
        for (int k = 0; k < n; k++) expected += double(a[k * n + at % n]) * b[at / n * n + k];
        REQUIRE(close(c[at], expected, 1e-4));
    }
    float dot, norm;
    GOOD(cublasSdot(blas, n, da, 1, db, 1, &dot));
    GOOD(cublasSnrm2(blas, n, da, 1, &norm));
    double dot_expected = 0, norm_expected = 0;
    for (int i = 0; i < n; i++) dot_expected += double(a[i]) * b[i], norm_expected += double(a[i]) * a[i];
    REQUIRE(close(dot, dot_expected, 1e-4) && close(norm, std::sqrt(norm_expected), 1e-4));
    for (float *memory : {da, db, dc}) GOOD(cudaFree(memory));
}

void half_products(cublasHandle_t blas, int n) {
    std::vector<__half> ones(n * n, __float2half(1));
    __half *da = on_device(ones), *dc = on_device(ones);
    float one = 1, zero = 0;
    GOOD(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, n, n, n, &one, da, CUDA_R_16F, n, da, CUDA_R_16F, n, &zero, dc, CUDA_R_16F, n,
                      CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    REQUIRE(__half2float(on_host(dc, n * n)[n * n - 1]) == n);
    GOOD(cudaFree(da));
    GOOD(cudaFree(dc));
}

void captured(cublasHandle_t blas, cudaStream_t stream) {
    const int n = 1000;
    float *a = on_device(std::vector<float>(n, 2)), *result = on_device(std::vector<float>(1));
    GOOD(cublasSetPointerMode(blas, CUBLAS_POINTER_MODE_DEVICE));
    GOOD(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    GOOD(cublasSdot(blas, n, a, 1, a, 1, result));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    GOOD(cudaStreamEndCapture(stream, &graph));
    GOOD(cudaGraphInstantiate(&exec, graph, 0));
    GOOD(cudaGraphLaunch(exec, stream));
    REQUIRE(on_host(result, 1)[0] == 4 * n);
    GOOD(cublasSetPointerMode(blas, CUBLAS_POINTER_MODE_HOST));
    GOOD(cudaGraphExecDestroy(exec));
    GOOD(cudaGraphDestroy(graph));
    GOOD(cudaFree(a));
    GOOD(cudaFree(result));
}

void transforms(cudaStream_t stream) {
    const int rows = 96, columns = 128, count = rows * columns;
    std::vector<std::complex<float>> wave(count);
    for (int i = 0; i < count; i++) wave[i] = {float(i % 7), float(i % 5)};
    auto *data = on_device(wave);
    cufftHandle plan;
    GOOD(cufftPlan2d(&plan, rows, columns, CUFFT_C2C));
    GOOD(cufftSetStream(plan, stream));
    auto *elements = reinterpret_cast<cufftComplex *>(data);
    GOOD(cufftExecC2C(plan, elements, elements, CUFFT_FORWARD));
    std::complex<float> sum = 0;
    for (auto value : wave) sum += value;
    REQUIRE(std::abs(on_host(data, 1)[0] - sum) < 1);
    GOOD(cufftExecC2C(plan, elements, elements, CUFFT_INVERSE));
    auto back = on_host(data, count);
    for (int i = 0; i < count; i++) REQUIRE(std::abs(back[i] / float(count) - wave[i]) < 1e-4);
    GOOD(cufftDestroy(plan));
    GOOD(cudaFree(data));
}

void random_numbers(cudaStream_t stream) {
    const int n = 1 << 20;
    for (auto kind : {CURAND_RNG_PSEUDO_XORWOW, CURAND_RNG_PSEUDO_PHILOX4_32_10, CURAND_RNG_PSEUDO_MTGP32}) {
        float *values;
        GOOD(cudaMalloc(&values, n * sizeof(float)));
        curandGenerator_t generator;
        GOOD(curandCreateGenerator(&generator, kind));
        GOOD(curandSetStream(generator, stream));
        GOOD(curandSetPseudoRandomGeneratorSeed(generator, 7));
        GOOD(curandGenerateUniform(generator, values, n));
        double mean = 0;
        for (float value : on_host(values, n)) mean += value / n;
        REQUIRE(close(mean, 0.5, 0.01));
        GOOD(curandDestroyGenerator(generator));
        GOOD(cudaFree(values));
    }
}

void sparse(cudaStream_t stream) {
    const int n = 1000;
    std::vector<int> starts(n + 1), columns(n);
    std::vector<float> diagonal(n), x(n, 3);
    for (int i = 0; i < n; i++) starts[i + 1] = i + 1, columns[i] = n - 1 - i, diagonal[i] = float(i);
    int *dstarts = on_device(starts), *dcolumns = on_device(columns);
    float *dvalues = on_device(diagonal), *dx = on_device(x), *dy = on_device(x), one = 1, zero = 0;
    cusparseHandle_t handle;
    cusparseSpMatDescr_t matrix;
    cusparseDnVecDescr_t vx, vy;
    GOOD(cusparseCreate(&handle));
    GOOD(cusparseSetStream(handle, stream));
    GOOD(cusparseCreateCsr(&matrix, n, n, n, dstarts, dcolumns, dvalues, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_32I, CUSPARSE_INDEX_BASE_ZERO, CUDA_R_32F));
    GOOD(cusparseCreateDnVec(&vx, n, dx, CUDA_R_32F));
    GOOD(cusparseCreateDnVec(&vy, n, dy, CUDA_R_32F));
    size_t size;
    GOOD(cusparseSpMV_bufferSize(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &one, matrix, vx, &zero, vy, CUDA_R_32F, CUSPARSE_SPMV_ALG_DEFAULT, &size));
    void *buffer;
    GOOD(cudaMalloc(&buffer, size + 1));
    GOOD(cusparseSpMV(handle, CUSPARSE_OPERATION_NON_TRANSPOSE, &one, matrix, vx, &zero, vy, CUDA_R_32F, CUSPARSE_SPMV_ALG_DEFAULT, buffer));
    auto y = on_host(dy, n);
    for (int i = 0; i < n; i++) REQUIRE(y[i] == 3 * i);
    GOOD(cusparseDestroySpMat(matrix));
    GOOD(cusparseDestroyDnVec(vx));
    GOOD(cusparseDestroyDnVec(vy));
    GOOD(cusparseDestroy(handle));
    for (void *memory : {(void *)dstarts, (void *)dcolumns, (void *)dvalues, (void *)dx, (void *)dy, buffer}) GOOD(cudaFree(memory));
}

void factors(cudaStream_t stream) {
    const int n = 64;
    std::vector<double> a(n * n);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < n; j++) a[i * n + j] = i == j ? n : 1.0 / (1 + i + j);
    double *da = on_device(a);
    int *info = on_device(std::vector<int>(1)), size;
    cusolverDnHandle_t handle;
    GOOD(cusolverDnCreate(&handle));
    GOOD(cusolverDnSetStream(handle, stream));
    GOOD(cusolverDnDpotrf_bufferSize(handle, CUBLAS_FILL_MODE_LOWER, n, da, n, &size));
    double *work;
    GOOD(cudaMalloc(&work, size * sizeof(double)));
    GOOD(cusolverDnDpotrf(handle, CUBLAS_FILL_MODE_LOWER, n, da, n, work, size, info));
    REQUIRE(on_host(info, 1)[0] == 0);
    auto l = on_host(da, n * n);
    double product = 0;
    for (int k = 0; k <= 20; k++) product += l[k * n + 20] * l[k * n + 40];
    REQUIRE(close(product, a[20 * n + 40], 1e-9));
    GOOD(cusolverDnDestroy(handle));
    for (void *memory : {(void *)da, (void *)info, (void *)work}) GOOD(cudaFree(memory));
}

void compiled() {
    const char *source = "extern \"C\" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }";
    nvrtcProgram program;
    GOOD(nvrtcCreateProgram(&program, source, "twice.cu", 0, nullptr, nullptr));
    const char *options[] = {"-arch=sm_80"};
    GOOD(nvrtcCompileProgram(program, 1, options));
    size_t size;
    GOOD(nvrtcGetPTXSize(program, &size));
    std::vector<char> ptx(size);
    GOOD(nvrtcGetPTX(program, ptx.data()));
    CUmodule module;
    CUfunction twice;
    GOOD(cuModuleLoadData(&module, ptx.data()));
    GOOD(cuModuleGetFunction(&twice, module, "twice"));
    float *x = on_device(std::vector<float>(32, 21));
    void *arguments[] = {&x};
    GOOD(cuLaunchKernel(twice, 1, 1, 1, 32, 1, 1, 0, nullptr, arguments, nullptr));
    REQUIRE(on_host(x, 32)[31] == 42);
    GOOD(cuModuleUnload(module));
    GOOD(nvrtcDestroyProgram(&program));
    GOOD(cudaFree(x));
}

int main() {
    cudaStream_t blocking, free_running;
    GOOD(cudaStreamCreate(&blocking));
    GOOD(cudaStreamCreateWithFlags(&free_running, cudaStreamNonBlocking));
    cublasHandle_t blas;
    GOOD(cublasCreate(&blas));
    for (cudaStream_t stream : {cudaStream_t(nullptr), cudaStreamLegacy, cudaStreamPerThread, blocking, free_running}) {
        GOOD(cublasSetStream(blas, stream));
        for (int n : {64, 275, 1024}) products(blas, n);
        half_products(blas, 64);
        half_products(blas, 1000);
        transforms(stream);
        random_numbers(stream);
        sparse(stream);
        factors(stream);
    }
    captured(blas, free_running);
    compiled();
    GOOD(cublasDestroy(blas));
    GOOD(cudaDeviceSynchronize());
    std::puts("cuBLAS, cuFFT, cuRAND, cuSPARSE, cuSOLVER, NVRTC: as on the host");
}
