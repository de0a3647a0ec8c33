"""min_p, top_k and top_p as one threshold a row: weights below it become 0. Nothing is sorted.

Weights are exp((logit - largest) / temperature), so they lie in [0, 1], and floats in that range are ordered like
their bits taken as an integer. The threshold is found from its highest bit to its lowest: a bit is set if the weights
at or above the number so far still are enough (k of them, or a share p of the sum). Thirty passes over the weights,
each a local sum and, under tensor parallelism, an all-reduce of one number a row.

Weights equal to the threshold are all kept: top_k may keep more than k tokens and top_p more than its smallest set
where float32 weights are equal. What would be the last to go, the largest weight, is always kept.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float32, Int32

from jaxserve.sampling import lanes
from jaxserve.sampling.branch import where_wanted
from jaxserve.sampling.params import RowParams

BITS = 30
"""1.0 is 0x3f800000."""
SMALLEST = jnp.finfo(jnp.float32).tiny

Weights = Float32[Array, "S G D L"]


def truncate(weights: Weights, params: RowParams, columns: NamedSharding | None = None) -> Weights:
    """Weights after min_p, then top_k, then top_p, the sum for top_p being that of what the others kept.

    The largest weight of a row must be 1 (a row of zeros stays one). Rows that ask for nothing keep their bits, and
    where no row asks for top_k, or none for top_p, its search is not run. Greedy rows never ask. `columns` is that of
    `sample.full`.
    """
    drawn = params.temperature > 0
    by_k = drawn & (params.top_k > 0)
    by_p = drawn & (params.top_p < 1)
    weights = _cut(weights, jnp.where(drawn, params.min_p, 0))
    weights = where_wanted(
        jnp.any(by_k), lambda w: _cut(w, jnp.where(by_k, top_k(w, params.top_k), 0)), weights, columns
    )
    return where_wanted(jnp.any(by_p), lambda w: _cut(w, jnp.where(by_p, top_p(w, params.top_p), 0)), weights, columns)


def top_k(weights: Weights, k: Int32[Array, "S"], bits: int = 1) -> Float32[Array, "S"]:
    """The k-th largest weight of each row (k from 1; 0 where fewer are above 0)."""

    def holds(least: Float32[Array, "S n"]) -> Bool[Array, "S n"]:
        kept = _above(weights, least, lambda _, above: above.astype(jnp.int32))
        return kept >= k[:, None]

    return largest(holds, len(k), bits)


def top_p(weights: Weights, p: Float32[Array, "S"], bits: int = 1) -> Float32[Array, "S"]:
    """The largest threshold that keeps a share of at least p of each row's sum."""
    zero = jnp.zeros((len(p), 1), jnp.float32)
    share = jnp.maximum(p[:, None] * _above(weights, zero, _mass), SMALLEST)
    return largest(lambda least: _above(weights, least, _mass) >= share, len(p), bits)


def largest(holds: Callable[[Float32[Array, "S n"]], Bool[Array, "S n"]], rows: int, bits: int) -> Float32[Array, "S"]:
    """The largest float32 in [0, 2) for which `holds`, which must hold up to some number and for none beyond; else 0.

    A pass settles `bits` bits (a divisor of 30) by trying 2**bits - 1 numbers a row. One is best on a CPU, where a
    number costs as much as a pass; more means fewer passes, so fewer launches and all-reduces.
    """
    digits = jnp.arange(1, 2**bits, dtype=jnp.int32)

    def settle(i: Int32[Array, ""], found: Int32[Array, "S"]) -> Int32[Array, "S"]:
        shift = BITS - bits * (i + 1)
        tried = found[:, None] + (digits << shift)
        kept = holds(lax.bitcast_convert_type(tried, jnp.float32))
        return found + (jnp.sum(kept, axis=-1, dtype=jnp.int32) << shift)

    found = lax.fori_loop(0, BITS // bits, settle, jnp.zeros(rows, jnp.int32))
    return lax.bitcast_convert_type(found, jnp.float32)


def _above(
    weights: Weights, least: Float32[Array, "S n"], worth: Callable[[Array, Array], Array]
) -> Float32[Array, "S n"] | Int32[Array, "S n"]:
    """What the weights at or above each of n thresholds add up to."""
    least = least[:, :, None, None]
    return lanes.total(lanes.along(weights[:, None], lambda w: worth(w, w >= least), jnp.add))


def _mass(weights: Array, above: Array) -> Array:
    return jnp.where(above, weights, 0)


def _cut(weights: Weights, least: Float32[Array, "S"]) -> Weights:
    return jnp.where(weights >= least[:, None, None, None], weights, 0)
