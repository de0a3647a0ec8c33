"""Log probabilities of the model's own distribution: of a given token, its rank, and of the likeliest tokens."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from jaxserve.sampling import lanes
from jaxserve.sampling.edits import LOWEST, clean

Scores = tuple[Float32[Array, "B"], Int32[Array, "B"], Int32[Array, "B top"], Float32[Array, "B top"]]


def score(logits: Float[Array, "B V"], targets: Int32[Array, "B"], *, vocab: int, top: int) -> Scores:
    """(logprob, rank, top_ids, top_logprobs) of one target a row. Same meanings as in `Sampled`.

    Args:
        logits: as the model gives them; of its V columns the first `vocab` are tokens.
        targets: token ids within the vocabulary.
        top: how many of the likeliest tokens to give, 0 to `vocab`.

    Raises:
        ValueError: `top` is out of range.
    """
    return scored(clean(logits, vocab), targets, vocab, top)


def scored(logits: Float32[Array, "B V"], targets: Int32[Array, "B"], vocab: int, top: int) -> Scores:
    """`score` of logits that are `clean` already."""
    if not 0 <= top <= vocab:
        raise ValueError(f"top must be in 0..{vocab} (the vocabulary), got {top}")
    x = lanes.spread(logits, -jnp.inf)
    most = jnp.max(x, axis=(1, 2, 3))
    rest = jnp.log(lanes.total(lanes.along(x, lambda x: jnp.exp(x - most[:, None, None]), jnp.add)))
    target = jnp.take_along_axis(logits, targets[:, None], axis=1, mode="clip")[:, 0]
    better = lanes.along(x, lambda x: (x > target[:, None, None]).astype(jnp.int32), jnp.add)
    values, ids = largest(logits, top)

    def logprob(value: Float32[Array, "B *n"]) -> Float32[Array, "B *n"]:
        shape = (-1, *[1] * (value.ndim - 1))
        return jnp.maximum(value - most.reshape(shape) - rest.reshape(shape), LOWEST)

    return logprob(target), 1 + lanes.total(better), ids, logprob(values)


def largest(x: Float32[Array, "B V"], top: int) -> tuple[Float32[Array, "B top"], Int32[Array, "B top"]]:
    """The `top` largest entries of each row, largest first, of equals the lower id first.

    They lie in the `top` blocks of neighbours with the largest maxima (of equals the earlier block), so only the
    maxima and those blocks are searched: under tensor parallelism that is all that leaves a shard.
    """
    if top == 0:
        return jnp.zeros((len(x), 0), jnp.float32), jnp.zeros((len(x), 0), jnp.int32)
    blocks, ids = _blocks(x)
    maxima = jnp.max(blocks, axis=-1)
    _, best = lax.top_k(maxima, min(top, maxima.shape[1]))
    best = jnp.sort(best, axis=1)
    rows = jnp.arange(len(x))[:, None]
    values, places = lax.top_k(blocks[rows, best].reshape(len(x), -1), top)
    return values, jnp.take_along_axis(ids[best].reshape(len(x), -1), places, axis=1)


def _blocks(x: Float32[Array, "B V"]) -> tuple[Float32[Array, "B n D"], Int32[Array, "n D"]]:
    """Rows as blocks of neighbours that cross no group, with their ids; minus infinity fills the last of each group."""
    spread = lanes.spread(x, -jnp.inf)
    ids = lanes.ids(x.shape[1])
    return spread.reshape(len(x), -1, lanes.DEPTH), ids.reshape(-1, lanes.DEPTH)
