"""A whole model over whole sequences, without a cache: for training, and as the oracle of the tests.

Everything here is differentiable and may be jitted. The serving path never comes here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.stack import Decoder, run_layers


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class OneSequence:
    """The step of a single sequence: token t is at position t."""

    positions: Int[Array, " T"]
    prompt_len: Int[Array, " T"]


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    *,
    window: int | Int[Array, ""] | None,
    scale: float,
) -> Float[Array, "T N H"]:
    """Causal attention within one sequence. Softmax in float32. `window` as in `stack.Attend`."""
    tokens, heads, size = q.shape
    q = q.reshape(tokens, k.shape[1], -1, size)
    scores = jnp.einsum("tkgh,skh->kgts", q, k, preferred_element_type=jnp.float32) * scale
    back = jnp.arange(tokens)[:, None] - jnp.arange(tokens)
    seen = (back >= 0) if window is None else (back >= 0) & (back < window)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("kgts,skh->tkgh", weights, v).reshape(tokens, heads, size)


def apply(model: Decoder, ids: Int[Array, "B L"], *, prompt_len: int | None = None) -> Float[Array, "B L V"]:
    """Float32 logits after every token. Every sequence has length L; a shorter one is padded at its end by the caller.

    `prompt_len`: how many of the L tokens came in as the prompt, for models with dynamic rope (default: all).
    """
    length = ids.shape[1]
    prompt = jnp.full(length, length if prompt_len is None else prompt_len, jnp.int32)
    step = OneSequence(jnp.arange(length, dtype=jnp.int32), prompt)
    return jax.vmap(partial(_one, model, step))(ids)


def _one(model: Decoder, step: OneSequence, ids: Int[Array, " L"]) -> Float[Array, "L V"]:
    groups = 1 + max(block.group for segment in model.segments for block in segment.blocks)
    nothing = (jnp.zeros(()),) * groups
    x, _ = run_layers(model.segments, model.embed_tokens(ids), nothing, step, _attend_uncached)
    return model.logits(model.finish(x))


def _attend_uncached(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: jax.Array,
    layer: Int[Array, ""],
    group: int,
    *,
    window: int | Int[Array, ""] | None,
    scale: float,
) -> tuple[Float[Array, "T N H"], jax.Array]:
    return attend(q, k, v, window=window, scale=scale), cache
