"""The gated feed-forward layer of Llama-like models."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.layers.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one leaf [2, F, D]."""

    def __init__(self, embed: int, mlp: int, *, bias: bool = False, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.gate_up = Linear(embed, (2, mlp), (None, "mlp", "embed"), bias=bias, rngs=rngs, dtype=dtype)
        self.down = Linear(mlp, (embed,), ("embed", "mlp"), bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.down(self.gate_up.gated(x))
