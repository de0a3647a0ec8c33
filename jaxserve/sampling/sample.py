"""The sampler: one token for each row of logits. `plain` for steps that only know temperature, `full` for the rest.

The order is vLLM's: log probabilities of the untouched logits; allowed tokens, bad words, stop tokens, bias, penalties;
then the most likely token, or temperature, min_p, top_k, top_p and a draw. No result of a row depends on another row,
nor on how many there are. Rows without a usable logit (NaN, all masked) still give a token of the vocabulary: the
lowest that is allowed if greedy, else any that is allowed; where nothing at all is allowed, an arbitrary one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int32, UInt32

from jaxserve.sampling import lanes
from jaxserve.sampling.branch import where_wanted
from jaxserve.sampling.draw import draw
from jaxserve.sampling.edits import LOWEST, clean, edited
from jaxserve.sampling.logprobs import Scores, score, scored
from jaxserve.sampling.params import RowLimits, RowParams, RowText, Sampled, Wants
from jaxserve.sampling.truncate import truncate

__all__ = ["full", "plain", "score"]

LEAST_TEMPERATURE = 0.01
BELOW_ONE = 1 - 2**-24


def plain(
    logits: Float[Array, "S V"],
    temperature: Float32[Array, "S"],
    seed: UInt32[Array, "S 2"],
    position: Int32[Array, "S"],
    vocab: int,
) -> Int32[Array, "S"]:
    """The most likely token where the temperature is 0, else a draw. Of V columns the first `vocab` are tokens."""
    x = lanes.spread(clean(logits, vocab), -jnp.inf)
    most, greedy = lanes.first_max(x, logits.shape[1])
    drawn = draw(weigh(x, most, temperature), seed, position, logits.shape[1])
    return jnp.clip(jnp.where(temperature > 0, drawn, greedy), 0, vocab - 1)


def full(
    logits: Float[Array, "S V"],
    params: RowParams,
    text: RowText,
    limits: RowLimits,
    wants: Wants,
    *,
    vocab: int,
    top: int,
    columns: NamedSharding | None = None,
) -> Sampled:
    """A token of each row by all that it asks for, with the `top` likeliest tokens where `wants.logprobs`.

    Args:
        logits: as the model gives them; of the V columns the first `vocab` are tokens.
        vocab: at least 1.
        top: 0 to `vocab`.
        columns: how logits are split over devices, if they are. What a `lax.cond` returns has to be told, or XLA for
            GPUs gathers the logits of all devices on each one.

    Raises:
        ValueError: a mask is too short for the vocabulary, or `top` is not in 0..vocab.
    """
    if limits.allow.shape[1] * 32 < vocab or limits.stops.shape[1] * 32 < vocab:
        raise ValueError(f"masks must have {-(-vocab // 32)} words for {vocab} tokens, got {limits.allow.shape[1]}")
    raw = clean(logits, vocab)
    x = lanes.spread(edited(raw, params, text, limits, wants, vocab, columns), -jnp.inf)
    most, greedy = lanes.first_max(x, logits.shape[1])
    weights = weigh(x, most, params.temperature)
    weights = where_wanted(wants.truncation, lambda w: truncate(w, params, columns), weights, columns)
    drawn = draw(weights, params.seed, text.position, logits.shape[1])
    token = jnp.clip(jnp.where(params.temperature > 0, drawn, greedy), 0, vocab - 1)
    scores = lax.cond(wants.logprobs, lambda: scored(raw, token, vocab, top), lambda: _no_scores(len(token), top))
    return Sampled(token, *scores)


def weigh(
    x: Float32[Array, "S G D L"], most: Float32[Array, "S"], temperature: Float32[Array, "S"]
) -> Float32[Array, "S G D L"]:
    """Probabilities in units of the largest one. Only the most likely tokens weigh 1, however close the next is."""
    most = jnp.maximum(most, LOWEST)[:, None, None, None]
    heat = jnp.maximum(temperature, LEAST_TEMPERATURE)[:, None, None, None]
    below = jnp.minimum(jnp.exp((x - most) / heat), BELOW_ONE)
    return lax.optimization_barrier(jnp.where(x == most, 1, below))


def _no_scores(rows: int, top: int) -> Scores:
    zero = jnp.zeros
    return zero(rows), zero(rows, jnp.int32), zero((rows, top), jnp.int32), zero((rows, top))
