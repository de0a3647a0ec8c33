"""How a step's attention is cut into units of work, and that the cut never shows in the result.

The keys of a sequence are cut at multiples of `split` tokens from position 0 on. A token's softmax runs over the tiles
of one split, in order; the splits' sums are then added in order. Whether one program walks all splits of a token or
each split is a unit of its own, whose sum goes through memory, is decided here by how many sums there is room for:
both ways add the same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

TILE = 64
"""Tokens of keys in a tile, and rows of queries (tokens x heads) that one warpgroup holds."""
PROGRAMS = 132
"""Programs that run side by side: the multiprocessors of an H100 or H200."""
SPLIT = 256
"""Tokens in a split, where sequences are not so long that more than `SPLITS` of them would be needed."""
SPLITS = 256
SLOTS = 512
"""Sums of splits that may wait in memory."""


def split_tokens(longest: int) -> int:
    """Tokens in a split where no sequence is longer than `longest` tokens: the same for every step of an engine."""
    size = SPLIT
    while size * SPLITS < longest:
        size *= 2
    return size


def slots(chunks: int, longest: int) -> int:
    """How many sums of splits need a place."""
    most = -(-longest // split_tokens(longest))
    return 0 if most == 1 else min(SLOTS, chunks * most)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Schedule:
    """The units of a step; the same for all its layers. I is the most there could be."""

    units: Int[Array, "I 8"]
    """Chunk, first token, tokens, position of the first token, first and last tile of keys (excluded), slot of the sum
    (-1: the result is written), length of the sequence."""
    count: Int[Array, ""]
    """Units that there are."""
    merges: Int[Array, "S 3"]
    """Slots of each chunk's sums (0: none), the first of them, the token they belong to."""


def schedule(
    starts: Int[Array, " S"],
    counts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    *,
    tokens: int,
    longest: int,
    per_unit: int,
) -> Schedule:
    """Cuts chunks into units of up to `per_unit` tokens, and chunks of one token into splits, longest ones first.

    Args:
        starts, counts, lengths: first token, tokens, and sequence length up to the chunk's end, of each chunk.
        tokens: tokens in the step; those behind the last chunk get units too, which see no key.
        longest: tokens that a row of the page table can hold.
        per_unit: tokens that a unit computes.
    """
    split, places = split_tokens(longest), slots(len(starts), longest)
    splits = jnp.where(counts == 1, -(-lengths // split), 0)
    spread = splits > _whole(splits, places)
    end = jnp.max(starts + counts, initial=0)
    starts, counts, lengths = (
        jnp.concatenate([a, b[None].astype(a.dtype)])
        for a, b in ((starts, end), (counts, tokens - end), (lengths, jnp.zeros_like(end)))
    )
    splits, spread = jnp.pad(splits, (0, 1)), jnp.pad(spread, (0, 1))
    sums = jnp.where(spread, splits, 0)
    slot = jnp.cumsum(sums) - sums
    parts = jnp.where(spread, splits, -(-counts // per_unit))
    ends = jnp.cumsum(parts)

    unit = jnp.arange(min(tokens, -(-tokens // per_unit) + len(starts)) + places)
    chunk = jnp.minimum(jnp.searchsorted(ends, unit, side="right", method="compare_all"), len(starts) - 1)
    nth = jnp.clip(unit - (ends - parts)[chunk], 0)
    alone = spread[chunk]
    # The last tokens of a chunk have most to do, so they come first.
    skipped = jnp.where(alone, 0, (parts[chunk] - 1 - nth) * per_unit)
    count = jnp.minimum(counts[chunk] - skipped, per_unit)
    position = lengths[chunk] - counts[chunk] + skipped
    tiles = split // TILE
    first = jnp.where(alone, nth * tiles, 0)
    last = -(-jnp.minimum(position + count, lengths[chunk]) // TILE)
    last = jnp.where(alone, jnp.minimum(last, first + tiles), last)
    fields = (
        chunk,
        starts[chunk] + skipped,
        count,
        position,
        first,
        last,
        jnp.where(alone, slot[chunk] + nth, -1),
        lengths[chunk],
    )
    return Schedule(
        units=jnp.stack([f.astype(jnp.int32) for f in fields], 1),
        count=ends[-1].astype(jnp.int32),
        merges=jnp.stack([sums[:-1], slot[:-1], starts[:-1]], 1).astype(jnp.int32),
    )


def _whole(splits: Int[Array, " S"], places: int) -> Int[Array, ""]:
    """Up to how many splits a token is walked through by one program: as few as the places allow."""
    steps = 1 << jnp.arange(SPLITS.bit_length())
    need = jnp.where(splits > steps[:, None], splits, 0).sum(1)
    return steps[jnp.argmax(need <= places)]
