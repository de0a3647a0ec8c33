"""Paged attention in plain XLA: for CPUs, for GPUs without a kernel of ours, and as the kernels' reference.

Every token of the step attends over its own sequence, whose keys and values lie in pages. Owns the order of
reduction; never knows a layer's weights, a scheduler, or how pages are chosen.

The keys of a sequence are read in tiles of `TILE` tokens from position 0 on, and a token's tiles are always added in
that order by one online softmax (Milakov and Gimelshein, arXiv:1805.02867), whether the token is decoded alone or
enters with a long prompt. A tile that a token may not see changes nothing, bit for bit.

A pool of uint8 holds the bits of float8_e4m3fn: keys and values divided by a scale for each KV head, which is 1 unless
given; what is too large is kept as the largest there is. XLA on CPUs gathers and scatters integers in place, but 8-bit
floats by converting the whole pool, there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve import native
from pallas_kernels import paged_attention as pallas

TILE = 128
"""Tokens of keys in a tile; a multiple of every page size."""
QUERIES = (256, 64)
"""Query tokens of one sequence that are computed together while a prompt enters: wide tiles first, then the rest."""

Window = int | Int[Array, ""] | None
Scales = Float[Array, "2 K"] | None
"""float32, of the keys and of the values of each KV head; None: 1."""
FLOAT8 = jnp.float8_e4m3fn
"""What the integers of a pool in 8 bits stand for."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Where the step's T tokens belong. Chunk s holds tokens starts[s] .. starts[s] + counts[s] - 1.

    Unused chunks have count 0, tokens behind the last chunk belong to none.
    """

    starts: Int[Array, " S"]
    counts: Int[Array, " S"]
    lengths: Int[Array, " S"]
    """Tokens of the sequence up to the chunk's end."""
    table: Int[Array, "S P"]
    """Page of each `page` tokens of the sequence."""
    slots: Int[Array, " T"]
    """Where the token's key and value go: page * size + offset; out of range for tokens of no chunk."""
    chunk: Int[Array, " T"]
    """The token's chunk."""
    positions: Int[Array, " T"]
    """The token's place in its sequence; below 0 for tokens of no chunk."""
    units: pallas.Schedule | None = None
    """The Pallas kernel's work, where it computes attention."""


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    kv: Float[Array, "pages 2 K page H"],
    batch: Batch,
    first: Int[Array, ""],
    *,
    window: Window,
    scale: float,
    scales: Scales = None,
    uniform: bool = False,
    kernels: native.Kernels | None = None,
) -> tuple[Float[Array, "T N H"], Float[Array, "pages 2 K page H"]]:
    """Writes the step's keys and values into the pool, then attends: `append` and `paged_attention`.

    `first`: where the layer's pages begin in the pool. `uniform`: a token's bits do not depend on how it came in.
    Native `kernels` that take such a pool do both.
    """
    if kernels is not None and kernels.attends(kv.dtype):
        where = batch.table, batch.starts, batch.counts, batch.lengths, batch.slots, first
        out, kv = kernels.attend(q, k, v, kv, *where, window, scale)
        return out.astype(q.dtype), kv
    size = kv.shape[0] * kv.shape[3]
    slots = jnp.where(batch.slots < size, batch.slots + first * kv.shape[3], size)
    kv = append(kv, k, v, slots, scales)
    return paged_attention(q, kv, batch, first, window=window, scale=scale, scales=scales, uniform=uniform), kv


def append(
    kv: Float[Array, "pages 2 K page H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    slots: Int[Array, " T"],
    scales: Scales = None,
) -> Float[Array, "pages 2 K page H"]:
    """Writes the step's keys and values in place (the pool is donated or carried)."""
    page, offset = slots // kv.shape[3], slots % kv.shape[3]
    new = jnp.stack([k, v], 1)
    if scales is not None:
        new = new / scales[:, :, None]
    if kv.dtype == jnp.uint8:
        most = float(jnp.finfo(FLOAT8).max)
        new = lax.bitcast_convert_type(jnp.clip(new, -most, most).astype(FLOAT8), jnp.uint8)
    return kv.at[page, :, :, offset].set(new.astype(kv.dtype), mode="drop")


def paged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "pages 2 K page H"],
    batch: Batch,
    first: Int[Array, ""],
    *,
    window: Window,
    scale: float,
    scales: Scales = None,
    uniform: bool = False,
) -> Float[Array, "T N H"]:
    """Attention of each token over its sequence up to itself, softmax in float32.

    `first` is added to every page number: where the layer's pages begin in the pool. The cost follows the real
    lengths, not the padding: the loops run as often as the longest sequence needs. Sequences that decode one token
    are computed side by side, longer chunks in query tiles one after the other; `uniform` takes the second way for
    all, so that a token's bits do not depend on how it came in.
    """
    if batch.units is not None:
        where = batch.starts, batch.counts, batch.lengths, batch.table, first
        return pallas.paged_attention(q, kv, *where, window=window, scale=scale, kv_scales=scales, units=batch.units)
    tokens, heads, size = q.shape
    kv_heads = kv.shape[2]
    table = batch.table + first
    left = jnp.where((batch.counts > 0) if uniform else (batch.counts > 1), batch.counts, 0)
    out = _in_tiles(q, kv, batch, table, left, QUERIES[uniform:], window, scale, scales)
    if not uniform:
        grouped = q.reshape(tokens, kv_heads, heads // kv_heads, size)
        one = _one_query(grouped, kv, batch, table, window, scale, scales)
        at = jnp.where(batch.counts == 1, batch.starts, tokens)
        out = out.at[at].set(one.reshape(-1, heads, size).astype(q.dtype), mode="drop")
    return out


def _in_tiles(
    q: Float[Array, "T N H"],
    kv: Float[Array, "pages 2 K page H"],
    batch: Batch,
    table: Int[Array, "S P"],
    left: Int[Array, " S"],
    widths: Sequence[int],
    window: Window,
    scale: float,
    scales: Scales,
) -> Float[Array, "T N H"]:
    """The first `left` tokens of each chunk in query tiles, the widest first; zero for the others."""
    tokens, heads, size = q.shape
    q = q.reshape(tokens, kv.shape[2], -1, size)
    done = jnp.zeros_like(left)
    widths = [w for w in widths if w < tokens] or [tokens]
    padded = jnp.pad(q, ((0, widths[0]), (0, 0), (0, 0), (0, 0)))
    out = jnp.zeros_like(padded)
    for width in widths:
        some = left if width == widths[-1] else left // width * width
        out = _many_queries(out, padded, kv, batch, table, done, some, width, window, scale, scales)
        done, left = done + some, left - some
    return out[:tokens].reshape(tokens, heads, size)


def _one_query(
    q: Float[Array, "T K G H"],
    kv: Float[Array, "pages 2 K page H"],
    batch: Batch,
    table: Int[Array, "S P"],
    window: Window,
    scale: float,
    scales: Scales,
) -> Float[Array, "S K G H"]:
    """The chunks of one token, side by side, in float32: as many rounds as the longest of them has tiles."""
    q = q[jnp.minimum(batch.starts, q.shape[0] - 1)].astype(jnp.float32) * scale
    at = jnp.where(batch.counts == 1, batch.lengths - 1, -1)
    low = _first_visible(at, window)
    per = TILE // kv.shape[3]

    def tile(i: Int[Array, ""], carry: _Sums) -> _Sums:
        pages = lax.dynamic_slice_in_dim(table, i * per, per, 1)
        key = i * TILE + jnp.arange(TILE)
        seen = (key <= at[:, None]) & (key >= low[:, None])
        k, v = _read(kv, pages, seen, scales)
        scores = jnp.einsum("skgh,skch->skgc", q, k)
        return carry.add(scores, seen[:, None, None], lambda p: jnp.einsum("skgc,skch->skgh", p, v))

    begin = jnp.min(jnp.where(at >= 0, low, jnp.iinfo(jnp.int32).max)) // TILE
    end = (jnp.max(at) + TILE) // TILE
    return lax.fori_loop(jnp.minimum(begin, end), end, tile, _Sums.zero(q)).value()


def _many_queries(
    out: Float[Array, "Tq K G H"],
    q: Float[Array, "Tq K G H"],
    kv: Float[Array, "pages 2 K page H"],
    batch: Batch,
    table: Int[Array, "S P"],
    skipped: Int[Array, " S"],
    counts: Int[Array, " S"],
    width: int,
    window: Window,
    scale: float,
    scales: Scales,
) -> Float[Array, "Tq K G H"]:
    """`counts` tokens of each chunk, behind the first `skipped`, in query tiles of one sequence each, put into `out`.

    `q` and `out` have `width` rows more than tokens, so that every tile is whole.
    """
    tiles = -(-counts // width)
    ends = jnp.cumsum(tiles)
    per = TILE // kv.shape[3]

    def one(n: Int[Array, ""], out: Float[Array, "Tq K G H"]) -> Float[Array, "Tq K G H"]:
        s = jnp.searchsorted(ends, n, side="right", method="compare_all")
        offset = (n - ends[s] + tiles[s]) * width
        start = batch.starts[s] + skipped[s] + offset
        count = jnp.minimum(counts[s] - offset, width)
        at = batch.lengths[s] - batch.counts[s] + skipped[s] + offset + jnp.arange(width)
        low = _first_visible(at, window)
        queries = lax.dynamic_slice_in_dim(q, start, width, 0).astype(jnp.float32) * scale
        queries = queries.transpose(1, 2, 0, 3)

        def tile(i: Int[Array, ""], carry: _Sums) -> _Sums:
            pages = lax.dynamic_slice(table, (s, i * per), (1, per))
            key = i * TILE + jnp.arange(TILE)
            k, v = _read(kv, pages, ((key < batch.lengths[s]) & (key >= low[0]))[None], scales)
            scores = jnp.einsum("kgqh,kch->kgqc", queries, k[0])
            seen = (key <= at[:, None]) & (key >= low[:, None])
            return carry.add(scores, seen[None, None], lambda p: jnp.einsum("kgqc,kch->kgqh", p, v[0]))

        end = (at[0] + count - 1) // TILE + 1
        sums = lax.fori_loop(low[0] // TILE, end, tile, _Sums.zero(queries))
        new = sums.value().transpose(2, 0, 1, 3).astype(out.dtype)
        old = lax.dynamic_slice_in_dim(out, start, width, 0)
        mine = (jnp.arange(width) < count)[:, None, None, None]
        return lax.dynamic_update_slice_in_dim(out, jnp.where(mine, new, old), start, 0)

    return lax.fori_loop(0, ends[-1], one, out)


def _first_visible(at: Int[Array, "..."], window: Window) -> Int[Array, "..."]:
    return jnp.zeros_like(at) if window is None else jnp.maximum(at - window + 1, 0)


def _read(
    kv: Float[Array, "pages 2 K page H"], pages: Int[Array, "S per"], valid: Bool[Array, "S C"], scales: Scales
) -> tuple[Float[Array, "S K C H"], Float[Array, "S K C H"]]:
    """Keys and values of one tile a sequence, in float32; values that are not the sequence's own read as zero.

    Behind its end and its window lies what another owner left; a NaN there would survive a weight of zero. Scores of
    such keys are replaced by the caller. A head's part of a page is one row of the pool, so a tile is gathered in
    whole rows and needs no transpose.
    """
    _, _, heads, page, size = kv.shape
    rows = kv.reshape(-1, page * size)
    first = pages[:, None] * (2 * heads) + jnp.arange(heads)[:, None]
    keys, values = (
        rows.at[first + part * heads].get(mode="promise_in_bounds").reshape(len(pages), heads, TILE, size)
        for part in (0, 1)
    )
    if kv.dtype == jnp.uint8:
        keys, values = (lax.bitcast_convert_type(x, FLOAT8) for x in (keys, values))
    keys, values = keys.astype(jnp.float32), jnp.where(valid[:, None, :, None], values, 0).astype(jnp.float32)
    if scales is None:
        return keys, values
    return keys * scales[0, :, None, None], values * scales[1, :, None, None]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Sums:
    """An online softmax: what the tiles so far add up to."""

    total: Float[Array, "*rows H"]
    top: Float[Array, "*rows"]
    norm: Float[Array, "*rows"]

    @staticmethod
    def zero(like: Float[Array, "*rows H"]) -> _Sums:
        rows = like.shape[:-1]
        return _Sums(jnp.zeros(like.shape), jnp.full(rows, -1e30), jnp.zeros(rows))

    def add(self, scores, seen, weigh) -> _Sums:  # noqa: ANN001 - f[*rows, C], bool, f[*rows, C] -> f[*rows, H]
        scores = jnp.where(seen, scores, -1e30)
        top = jnp.maximum(self.top, scores.max(-1))
        p = jnp.where(seen, jnp.exp(scores - top[..., None]), 0.0)
        shrink = jnp.exp(self.top - top)
        return _Sums(self.total * shrink[..., None] + weigh(p), top, self.norm * shrink + p.sum(-1))

    def value(self) -> Float[Array, "*rows H"]:
        return self.total / jnp.maximum(self.norm, 1e-30)[..., None]
