"""JAX: compiled functions, gradients, products."""
import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
import jax
import jax.numpy as jnp
import numpy as np

x = np.random.default_rng(10).standard_normal((128, 200)).astype(np.float32)
w = np.random.default_rng(11).standard_normal((200, 50)).astype(np.float32)


@jax.jit
def loss(w):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


assert jax.devices()[0].platform == "gpu"
assert abs(float(loss(w)) - np.mean(np.tanh(x @ w) ** 2)) < 1e-3
slope = np.asarray(jax.grad(loss)(w))
step = np.zeros_like(w)
step[3, 4] = 1e-2
assert abs((float(loss(w + step)) - float(loss(w - step))) / 2e-2 - slope[3, 4]) < 1e-3
assert np.allclose(np.asarray(jnp.sort(jnp.asarray(x), axis=1)), np.sort(x, axis=1))
print("jax ok")
