"""Root-mean-square norm. Always computed in float32, with a float32 gain, whatever the model's dtype."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.weights import leaf


class RMSNorm(nnx.Module):
    """x / rms(x) * gain over the last dimension; the result has the dtype of x."""

    def __init__(self, size: int, eps: float) -> None:
        self.g = leaf.gain(size, jnp.float32)
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * self.g[...]).astype(x.dtype)
