"""Rotary position embedding: cos and sin for each token, and the rotation. Frequencies come from `models/rope.py`.

Frequencies are float64 until here; angles, cos and sin are float32, and x is rotated in float32.

Dynamic NTK raises the base with the length of the sequence, so a token's angles depend on more than its position.
The rule: **a token at position p of a sequence whose prompt has n tokens is rotated for the length max(n, p + 1)**.
The keys of a prompt are thus rotated for the whole prompt, each later key for the length at which it appeared, and
what is in a cache is never rotated again. Angles are a function of (p, n) alone: chunks, preemption and the company in
a batch change nothing. It is what transformers computes in a fresh model that takes a prompt in one call and goes on
token by token from its cache. Where transformers is fed a prompt in pieces, or by a model that has seen a longer
sequence before, its answer depends on those calls, and differs from this.

A prefix cache must know: beyond the original length, keys of prompts of different length differ. What they share is
`Stretch.length_of(prompt)`, which belongs in the hash when `Rope.stretch` is set.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.layers.stack import Step


@dataclass(frozen=True)
class Stretch:
    """Dynamic NTK: beyond `original` tokens the base grows with the length, `factor` saying how fast."""

    factor: float
    original: int

    def length_of(self, prompt_len: int) -> int:
        """Two prompts with one beginning have the same keys there if, and only if, this is equal."""
        return max(prompt_len, self.original)


@dataclass(frozen=True)
class Rope:
    """How to rotate. Hashable, no arrays: part of a model's structure, not of its weights."""

    inv_freq: tuple[float, ...]
    """Radians a position, for each pair of rotated dimensions."""
    scale: float = 1.0
    """Factor on cos and sin (yarn)."""
    stretch: Stretch | None = None
    """Set for dynamic NTK: then `Step.prompt_len` is read."""

    def cos_sin(self, step: Step) -> tuple[Float[Array, "T R/2"], Float[Array, "T R/2"]]:
        """Float32 cos and sin of the tokens' angles."""
        freq = jnp.asarray(np.asarray(self.inv_freq, np.float32))
        if self.stretch is not None:
            freq = freq * _slower(self.stretch, step, len(self.inv_freq))
        angle = step.positions.astype(jnp.float32)[:, None] * freq
        return jnp.cos(angle) * self.scale, jnp.sin(angle) * self.scale


def rotate(
    x: Float[Array, "T N H"], cos_sin: tuple[Float[Array, "T R/2"], Float[Array, "T R/2"]]
) -> Float[Array, "T N H"]:
    """Rotates the first R dimensions of every head, dimension i paired with i + R/2; the others pass."""
    cos, sin = (table[:, None, :] for table in cos_sin)
    half = cos.shape[-1]
    low, high = (x[..., i * half : (i + 1) * half].astype(jnp.float32) for i in range(2))
    turned = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)


def _slower(stretch: Stretch, step: Step, pairs: int) -> Float[Array, "T R/2"]:
    """What dynamic NTK multiplies each frequency by: base ** (-i / pairs), the base raised for the token's length."""
    length = jnp.maximum(jnp.maximum(step.prompt_len, step.positions + 1), stretch.original).astype(jnp.float32)
    growth = 1.0 + stretch.factor * (length - stretch.original) / stretch.original
    exponent = np.arange(pairs, dtype=np.float32) / (pairs - 1)
    return jnp.exp(-jnp.log(growth)[:, None] * exponent)
