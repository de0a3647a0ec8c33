"""One token a row by chance. The chance is a function of (seed, position) alone, and no other row has any part in it.

One Threefry-2x32 block with the seed as the key and the position as the counter gives two words, so two uniform
numbers of 24 bits: the first picks a lane of the vocabulary by the lanes' sums, the second a token within the lane.
Two small inverse CDFs are more exact in float32 than one: a rare token is compared with its 31 neighbours, not with
the whole vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jaxtyping import Array, Float32, Int32, UInt32

from jaxserve.sampling import lanes


def uniforms(seed: UInt32[Array, "S 2"], position: Int32[Array, "S"]) -> Float32[Array, "S 2"]:
    """Two numbers in [0, 1) a row, multiples of 2**-24."""
    counter = jnp.stack([position.astype(jnp.uint32), jnp.zeros_like(position, jnp.uint32)], axis=-1)
    words = jax.vmap(threefry_2x32)(seed, counter)
    return (words >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def draw(
    weights: Float32[Array, "S G D L"], seed: UInt32[Array, "S 2"], position: Int32[Array, "S"], size: int
) -> Int32[Array, "S"]:
    """A token of each row, with a probability in proportion to its weight.

    `weights` are `lanes.spread` over a vocabulary of `size`, finite, not negative. A token of weight 0 is never drawn,
    but for a row that has no other: that gives token 0.
    """
    chance = uniforms(seed, position)
    sums = lanes.along(weights, lambda x: x, jnp.add)
    chosen = pick(sums.reshape(len(sums), -1), chance[:, 0])
    depth = pick(lanes.lane(weights, chosen), chance[:, 1])
    length = sums.shape[-1]
    return lanes.ids(size)[chosen // length, depth, chosen % length]


def pick(weights: Float32[Array, "S N"], chance: Float32[Array, "S"]) -> Int32[Array, "S"]:
    """Inverse CDF: the first entry at which the running sum exceeds `chance` times the whole.

    Running sums in float32 need not rise at every entry, so an entry of weight 0 is ruled out expressly.
    """
    running = jnp.cumsum(weights, axis=-1)
    places = jnp.arange(weights.shape[-1], dtype=jnp.int32)
    possible = weights > 0
    beyond = possible & (running > chance[:, None] * running[:, -1:])
    first = jnp.min(jnp.where(beyond, places, places[-1]), axis=-1)
    last = jnp.max(jnp.where(possible, places, 0), axis=-1)
    return jnp.minimum(first, last)
