"""numba: a kernel from NVVM, and an atomic."""
import numpy as np
from numba import cuda


@cuda.jit
def histogram(bins, x):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(bins, x[i], 1)


x = np.random.default_rng(9).integers(0, 100, 100_000).astype(np.int32)
bins = cuda.to_device(np.zeros(100, np.int32))
histogram[(x.size + 255) // 256, 256](bins, cuda.to_device(x))
assert np.array_equal(bins.copy_to_host(), np.bincount(x, minlength=100))
print("numba ok")
