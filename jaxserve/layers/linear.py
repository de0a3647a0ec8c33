"""Projections. Weights that share an input are one leaf: q, k and v here, gate and up in `mlp`.

How a weight is stored and multiplied is the leaf's business (`weights/leaf.py`), not this file's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.weights import leaf


class Linear(nnx.Module):
    """y = w x + b, with w [*out, D] as checkpoints have it and b [*out] or none. `axes` names the dimensions of w."""

    def __init__(
        self,
        size: int,
        out: tuple[int, ...],
        axes: leaf.Axes,
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ) -> None:
        self.w = leaf.param(rngs, (*out, size), axes, dtype)
        self.b = leaf.bias(out, axes[:-1], dtype) if bias else None

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T ..."]:
        y = leaf.project(x, self.w)
        return y if self.b is None else y + self.b[...]

    def gated(self, x: Float[Array, "T D"]) -> Float[Array, "T F"]:
        """silu(y[:, 0]) * y[:, 1] of y = w x + b, with w [2, F, D]."""
        return leaf.project_gated(x, self.w) if self.b is None else leaf.gate(self(x))


def qkv_linear(
    embed: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False, rngs: nnx.Rngs, dtype: jnp.dtype
) -> Linear:
    """w [K, (G+2)*H, D]: for each KV head the G query heads that read it, then its key, then its value."""
    out = (kv_heads, (heads // kv_heads + 2) * head_dim)
    return Linear(embed, out, ("kv_heads", None, "embed"), bias=bias, rngs=rngs, dtype=dtype)


def split_qkv(
    y: Float[Array, "T K GH"], head_dim: int
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """q, k, v from the result of `qkv_linear`. Query head n = k*G + g."""
    tokens, kv_heads, _ = y.shape
    y = y.reshape(tokens, kv_heads, -1, head_dim)
    return y[:, :, :-2].reshape(tokens, -1, head_dim), y[:, :, -2], y[:, :, -1]


class Vocabulary(nnx.Module):
    """w [V, D]: rows for tokens in, or scores for tokens out. Rows from `size` on are padding."""

    def __init__(self, size: int, padded: int, embed: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.w = leaf.param(rngs, (padded, embed), ("vocab", "embed"), dtype, jax.nn.initializers.normal(embed**-0.5))
        self.size, self.padded = size, padded

    def embed(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return leaf.embed(ids, self.w)

    def scores(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Float32 logits; -inf for padding, so that nothing can choose it."""
        y = leaf.unembed(x, self.w)
        return y if self.size == self.padded else jnp.where(jnp.arange(self.padded) < self.size, y, -jnp.inf)
