"""CuPy: NVRTC kernels, cuBLAS, cuFFT, raw kernels, memory pools."""
import cupy as cp
import numpy as np

x = np.random.default_rng(8).standard_normal((256, 300))
assert np.allclose(cp.asnumpy(cp.asarray(x) @ cp.asarray(x).T), x @ x.T)
assert np.allclose(cp.asnumpy(cp.fft.fft(cp.asarray(x))), np.fft.fft(x))
assert np.allclose(cp.asnumpy(cp.sin(cp.asarray(x)) ** 2 + 1), np.sin(x) ** 2 + 1)
add = cp.RawKernel(
    'extern "C" __global__ void add(double* y, const double* x, int n)'
    "{ int i = blockDim.x * blockIdx.x + threadIdx.x; if (i < n) y[i] += x[i]; }",
    "add",
)
y = cp.ones(x.size)
add(((x.size + 255) // 256,), (256,), (y, cp.asarray(x.ravel()), np.int32(x.size)))
assert np.allclose(cp.asnumpy(y), x.ravel() + 1)
assert int(cp.arange(1000).sum()) == 499500
print("cupy ok")
