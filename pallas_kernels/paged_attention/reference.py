"""Paged attention in plain jnp, in float32: slow, and easy to believe."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def paged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "pages 2 K page H"],
    starts: Int[Array, " S"],
    counts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    table: Int[Array, "S P"],
    first: Int[Array, ""] | int,
    *,
    window: Int[Array, ""] | int | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "2 K"] | None = None,
) -> Float[Array, "T N H"]:
    """What the kernel computes; its parameters are explained there. Tokens of no chunk come out as zeros."""
    tokens, heads, size = q.shape
    kv_heads = kv.shape[2]
    token = jnp.arange(tokens)[:, None]
    mine = (token >= starts) & (token < starts + counts)
    chunk, live = jnp.argmax(mine, 1), mine.any(1)
    at = (lengths - counts - starts)[chunk] + token[:, 0]

    rows = kv[table + first]
    if kv.dtype == jnp.uint8:
        rows = lax.bitcast_convert_type(rows, jnp.float8_e4m3fn)
    rows = rows.astype(jnp.float32)
    if kv_scales is not None:
        rows = rows * kv_scales[:, :, None, None]
    rows = rows.transpose(2, 0, 3, 1, 4, 5).reshape(2, len(table), kv_heads, -1, size)
    key = jnp.arange(rows.shape[3])
    seen = (key <= at[:, None]) & live[:, None]
    if window is not None:
        seen &= key > at[:, None] - window
    k, v = rows[:, chunk]
    v = jnp.where(seen[:, None, :, None], v, 0)
    scores = jnp.einsum("tkgh,tkch->tkgc", q.reshape(tokens, kv_heads, -1, size).astype(jnp.float32), k) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    seen = seen[:, None, None]
    sink = jnp.full((heads,), -jnp.inf) if sinks is None else sinks.astype(jnp.float32)
    sink = sink.reshape(1, kv_heads, -1, 1)
    top = jnp.maximum(jnp.where(seen, scores, -1e30).max(-1, keepdims=True), sink)
    p = jnp.where(seen, jnp.exp(scores - top), 0)
    norm = p.sum(-1, keepdims=True) + jnp.exp(sink - top)
    out = jnp.einsum("tkgc,tkch->tkgh", p / jnp.maximum(norm, 1e-30), v)
    return out.reshape(q.shape).astype(q.dtype)
