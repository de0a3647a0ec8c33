"""What a request does to its logits before one is chosen: masks, bad words, bias, penalties.

Two strengths: outside `allow` is minus infinity, and never chosen. Bad words, stop tokens before `min_tokens`, and
logits that were NaN or infinite are `LOWEST`: chosen only where nothing else is left, so that a row always has an
answer. Both absorb bias and penalties, which is why masks may come last.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from jaxserve.sampling.branch import where_wanted
from jaxserve.sampling.params import RowLimits, RowParams, RowText, Wants

HIGHEST = jnp.finfo(jnp.float32).max
LOWEST = jnp.finfo(jnp.float32).min

Logits = Float32[Array, "S V"]


def clean(logits: Float[Array, "S V"], vocab: int) -> Logits:
    """Finite within the vocabulary (NaN is `LOWEST`), minus infinity in its padding."""
    x = logits.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), LOWEST, jnp.clip(x, LOWEST, HIGHEST))
    return jnp.where(jnp.arange(x.shape[-1]) < vocab, x, -jnp.inf)


def edited(
    logits: Logits,
    params: RowParams,
    text: RowText,
    limits: RowLimits,
    wants: Wants,
    vocab: int,
    columns: NamedSharding | None = None,
) -> Logits:
    """Clean logits after everything that the rows ask for. `columns` is that of `sample.full`."""

    x = where_wanted(wants.bad_words, lambda x: without_bad_words(x, text, limits), logits, columns)
    x = where_wanted(wants.bias, lambda x: with_bias(x, limits), x, columns)
    x = where_wanted(wants.penalties, lambda x: with_penalties(x, params, text), x, columns)
    return masked(x, params, text, limits, vocab)


def without_bad_words(logits: Logits, text: RowText, limits: RowLimits) -> Logits:
    """Rules out the last token of each bad sequence whose other tokens are the last ones generated."""
    before, last = limits.bad[..., :-1], limits.bad[..., -1]
    due = jnp.all((before < 0) | (before == text.recent[:, None, :]), axis=-1) & (last >= 0)
    return logits.at[_places(logits, jnp.where(due, last, -1))].set(LOWEST, mode="drop")


def with_bias(logits: Logits, limits: RowLimits) -> Logits:
    """Adds each row's sparse bias; an id that stands twice counts twice."""
    return logits.at[_places(logits, limits.bias_ids)].add(limits.bias, mode="drop")


def with_penalties(logits: Logits, params: RowParams, text: RowText) -> Logits:
    """Repetition for what the prompt or the output holds, then frequency and presence for the output alone."""
    repetition = params.repetition[:, None]
    count = text.counts.astype(jnp.float32)
    said = text.counts > 0
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    x = jnp.where(said | text.in_prompt, scaled, logits)
    return x - params.frequency[:, None] * count - jnp.where(said, params.presence[:, None], 0)


def masked(logits: Logits, params: RowParams, text: RowText, limits: RowLimits, vocab: int) -> Logits:
    """Applies `allow`, and `stops` in rows that have generated fewer than `min_tokens`."""
    size = logits.shape[-1]
    early = (text.generated < params.min_tokens)[:, None]
    stops = bits(jnp.where(early, limits.stops, 0), size)
    allow = bits(limits.allow, size) & (jnp.arange(size) < vocab)
    return jnp.where(allow, jnp.where(stops, LOWEST, jnp.clip(logits, LOWEST, HIGHEST)), -jnp.inf)


def bits(words: UInt32[Array, "S W"], size: int) -> Bool[Array, "S V"]:
    """The first `size` bits of each row's mask, lowest bit first; bits that W words don't have are 0."""
    one_by_one = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    flat = one_by_one.astype(bool).reshape(len(words), -1)[:, :size]
    return jnp.pad(flat, ((0, 0), (0, size - flat.shape[1])))


def _places(logits: Logits, ids: Int32[Array, "S n"]) -> tuple[Array, Array]:
    """Where the ids of each row are; negative ones outside, to be dropped instead of counted from the end."""
    rows, size = logits.shape
    return jnp.arange(rows)[:, None], jnp.where(ids < 0, size, ids)
