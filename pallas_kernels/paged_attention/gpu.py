"""Paged attention for Hopper GPUs in Pallas Mosaic: TMA copies, wgmma, one warpgroup that fetches and two that compute.

Programs stay on their multiprocessor and take one unit of the schedule and KV head after the other. A computing
warpgroup (a lane) holds 64 rows: tokens x the query heads of the KV head, so keys and values are read once for all of
them. Where a unit has more tokens than a lane holds, both lanes work on it and share its keys; where it has one, they
take turns. Heads wider than 128 are cut by value columns instead: both lanes compute the scores, each its half of the
output.

Keys and values in 8 bits travel as they are; each lane widens what it multiplies into a place of its own. Their scales
multiply scores and results.

The running maximum of the softmax is rounded to a whole number in the domain of base two, so that moving a sum from
one maximum to another multiplies by a power of two and is exact: whether a sum went through memory, or in which way
the compiler contracted multiply and add, cannot show.
"""

# Pallas names the references of a kernel differently in each of its functions, and none of the names is public.
# pyright: reportArgumentType=false, reportReturnType=false, reportAbstractUsage=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.units import PROGRAMS, TILE, Schedule, split_tokens

LANES = 2
LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
NARROW = plgpu.Layout.WGMMA_UPCAST_2X
"""How a lane holds 8-bit values: four of a row in each thread."""
MEMORY = 224 * 1024
"""Bytes of shared memory that the large buffers may take."""

KEY_SCALE, VALUE_SCALE = TILE, TILE + 1
"""Columns of `_per_head`, behind the sinks of its rows."""

Index = Int[Array, ""]
Row = Float[Array, " 64"]
Positions = Int[Array, " 64"]
Ref = jax.Ref


@dataclass(frozen=True)
class Rows:
    """How tokens fill the 64 rows of a lane."""

    group: int
    """Query heads of a KV head."""
    size: int

    @property
    def packed(self) -> int:
        """Rows of a token: the group, padded so that tokens begin at whole 128 bytes and fill a tile."""
        return max(1 << (self.group - 1).bit_length(), 1 if self.size % 64 == 0 else 2)

    @property
    def tokens(self) -> int:
        """Of one lane."""
        return TILE // self.packed

    @property
    def by_columns(self) -> bool:
        """Whether the lanes share the rows and divide the columns of the values."""
        return self.size > 128

    @property
    def per_unit(self) -> int:
        """Tokens of both lanes."""
        return self.tokens if self.by_columns else LANES * self.tokens


@dataclass(frozen=True)
class Geometry:
    """What is known when the kernel is compiled."""

    heads: int
    kv_heads: int
    size: int
    page: int
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    longest: int
    """Tokens that a row of the page table can hold."""
    scale: float
    soft_cap: float | None
    sinks: bool

    @property
    def rows(self) -> Rows:
        return Rows(self.heads // self.kv_heads, self.size)

    @property
    def by_columns(self) -> bool:
        return self.rows.by_columns

    @property
    def blocks(self) -> int:
        """Blocks of value columns."""
        return LANES if self.by_columns else 1

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.size // self.blocks

    @property
    def kept(self) -> int:
        """Rows of a sum that goes through memory: those of a token, in whole tiles of shared memory."""
        return max(self.rows.packed, 8)

    @property
    def narrow(self) -> bool:
        """Whether keys and values have to be widened before they are multiplied."""
        return self.kv_dtype != self.dtype

    @property
    def stages(self) -> int:
        """Tiles of keys and values that are in flight."""
        fixed = LANES * TILE * self.columns * (2 + 4 + 2 * self.narrow)
        return min(8, (MEMORY - fixed) // (2 * TILE * self.size * self.kv_dtype.itemsize))

    @property
    def piece(self) -> int:
        """Columns that are widened at a time: those of a tile in shared memory."""
        return 64 if self.columns % 64 == 0 else 32

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that fetches, and of one that computes; three warpgroups have no more than 504 together."""
        return (56, 224) if self.narrow else (40, 232)

    def transforms(self, dtype: jnp.dtype) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        """How rows lie in shared memory, for wgmma and without bank conflicts."""
        bytes_ = jnp.dtype(dtype).itemsize
        swizzle = next(w for w in (128, 64, 32) if w <= 64 * bytes_ and self.columns * bytes_ % w == 0)
        return plgpu.TilingTransform((8, swizzle // bytes_)), plgpu.SwizzleTransform(swizzle)


class Sums(NamedTuple):
    """Tiles added up so far: sum of weighted values, largest score (whole, base two), sum of weights."""

    total: Float[Array, "64 columns"]
    top: Row
    norm: Row


def _nothing(columns: int) -> Sums:
    return Sums(
        plgpu.layout_cast(jnp.zeros((TILE, columns), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((TILE,), -1e30, jnp.float32), LAYOUT.reduce(1)),
        plgpu.layout_cast(jnp.zeros((TILE,), jnp.float32), LAYOUT.reduce(1)),
    )


def _add(a: Sums, b: Sums) -> Sums:
    top = jnp.maximum(a.top, b.top)
    by_a, by_b = jnp.exp2(a.top - top), jnp.exp2(b.top - top)
    return Sums(a.total * _across(by_a, a.total) + b.total * _across(by_b, b.total), top, a.norm * by_a + b.norm * by_b)


def _masked(x: Float[Array, "64 columns"], kept: Array) -> Float[Array, "64 columns"]:
    return jnp.where(_across(kept, x), x, jnp.zeros_like(x))


def _across(row: Row, like: Float[Array, "64 columns"]) -> Float[Array, "64 columns"]:
    return lax.broadcast_in_dim(row, like.shape, [0])


def _value(
    sums: Sums, sink: Row | None, scale: Float[Array, ""] | None, dtype: jnp.dtype
) -> Float[Array, "64 columns"]:
    """What the sums come to, times `scale`."""
    total, top, norm = sums
    if sink is not None:
        sink = sink * LOG2E
        top = jnp.maximum(top, _whole(sink))
        by = jnp.exp2(sums.top - top)
        total, norm = total * _across(by, total), norm * by + jnp.exp2(sink - top)
    value = total / _across(jnp.maximum(norm, 1e-30), total)
    return (value if scale is None else value * scale).astype(dtype)


def _sink(per_head: Ref, head: Index) -> Row:
    return plgpu.load(per_head.at[head, pl.ds(0, TILE)], layout=LAYOUT.reduce(1), optimized=False)


def _whole(x: Row) -> Row:
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _i32(x: int) -> Index:
    return jnp.array(x, jnp.int32)


class _Unit(NamedTuple):
    """What one program does at a time: a unit of the schedule for one KV head."""

    head: Index
    chunk: Index
    token: Index
    count: Index
    position: Index
    first: Index
    last: Index
    slot: Index
    length: Index

    @staticmethod
    def read(ref: Ref, n: Index, kv_heads: int, low: Callable[[Index], Index]) -> _Unit:
        unit = lax.div(n, _i32(kv_heads))
        chunk, token, count, position, first, last, slot, length = (ref[unit, i] for i in range(8))
        first = jnp.maximum(first, lax.div(low(position), _i32(TILE)))
        return _Unit(lax.rem(n, _i32(kv_heads)), chunk, token, count, position, first, last, slot, length)

    @property
    def tiles(self) -> Index:
        return jnp.maximum(self.last - self.first, 0)


@dataclass(frozen=True)
class _Scratch:
    """Shared memory of a program, and its barriers: `full` when data has come, `free` when it has been used."""

    q: Ref
    k: Ref
    v: Ref
    out: tuple[Ref, Ref]
    stats: Ref
    k_full: Ref
    k_free: Ref
    v_full: Ref
    v_free: Ref
    v_clean: Ref
    met: Ref
    wide: Ref | None = None
    """A lane's tile of keys, then of values, in 16 bits, where they come in 8."""

    @staticmethod
    def types(g: Geometry, interpreted: bool) -> dict[str, object]:
        copies = TILE // min(g.page, TILE)
        out = (
            plgpu.SMEM((LANES, 2, TILE, g.columns), g.dtype),
            plgpu.SMEM((LANES, TILE, g.columns), jnp.float32, transforms=g.transforms(jnp.float32)),
        )
        wide = plgpu.SMEM((LANES, TILE, g.columns), g.dtype, transforms=g.transforms(g.dtype))
        return ({"wide": wide} if g.narrow else {}) | {
            # A lane's rows; where lanes divide the columns, the first and second half of the heads.
            "q": plgpu.SMEM((LANES, TILE, g.columns), g.dtype, transforms=g.transforms(g.dtype)),
            "k": plgpu.SMEM((g.stages, TILE, g.size), g.kv_dtype, transforms=g.transforms(g.kv_dtype)),
            "v": plgpu.SMEM((g.stages * g.blocks, TILE, g.columns), g.kv_dtype, transforms=g.transforms(g.kv_dtype)),
            # A lane's output and its sum, in the same place; the interpreter would take that for a race of the lanes.
            "out": out if interpreted else plgpu.RefUnion(*out),
            "stats": plgpu.SMEM((LANES, 2, TILE), jnp.float32),
            "k_full": plgpu.Barrier(num_arrivals=copies, num_barriers=g.stages),
            "k_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=g.stages),
            "v_full": plgpu.Barrier(num_arrivals=copies * g.blocks, num_barriers=g.stages),
            "v_free": plgpu.Barrier(num_arrivals=LANES, num_barriers=g.stages),
            "v_clean": plgpu.Barrier(num_barriers=g.stages),
            "met": plgpu.Barrier(num_arrivals=LANES),
        }


@dataclass(frozen=True)
class _Program:
    """One program's view: arrays in global memory, its scratch, and which way of multiplying is compiled."""

    g: Geometry
    interpreted: bool
    units: Ref
    now: Ref
    """i32[3]: units, first page of the layer, window."""
    table: Ref
    q: Ref
    kv: Ref
    per_head: Ref
    out: Ref
    sums: Ref
    stats: Ref
    s: _Scratch

    def run(self) -> None:
        warpgroup = lax.axis_index("warpgroup")
        compute, fetch = pl.when(warpgroup < LANES), pl.when(warpgroup == LANES)
        compute(lambda: self._compute(warpgroup))
        fetch(self._fetch)

    def _each_unit(self, do: Callable[[Index, _Unit, Index], None]) -> None:
        """Calls do(nth, unit, tiles of keys before it) for this program's units."""
        programs, me = _i32(lax.axis_size("program")), lax.axis_index("program")
        total = self.now[0] * self.g.kv_heads

        def one(n: Index, before: Index) -> Index:
            unit = _Unit.read(self.units, me + n * programs, self.g.kv_heads, self._low)
            do(n, unit, before)
            return before + unit.tiles

        lax.fori_loop(_i32(0), lax.div(total - me + programs - 1, programs), one, _i32(0))

    def _low(self, position: Index) -> Index:
        """First position that a token at `position` may see."""
        return jnp.maximum(position - self.now[2] + 1, 0)

    def _stage(self, tile: Index) -> Index:
        return lax.rem(tile, _i32(self.g.stages))

    # ---- the warpgroup that fetches

    def _fetch(self) -> None:
        plgpu.set_max_registers(self.g.registers[0], action="decrease")

        def unit(n: Index, unit: _Unit, before: Index) -> None:
            def tile(i: Index, _: None) -> None:
                self._fetch_tile(unit, unit.first + i, self._stage(before + i))

            lax.fori_loop(_i32(0), unit.tiles, tile, None)

        self._each_unit(unit)
        for stage in range(self.g.stages):
            plgpu.barrier_wait(self.s.k_free.at[stage])
            plgpu.barrier_wait(self.s.v_free.at[stage])

    def _fetch_tile(self, unit: _Unit, tile: Index, stage: Index) -> None:
        """The pages of 64 keys and values; behind the table's end any page will do, it is not seen."""
        g, s = self.g, self.s
        rows = min(g.page, TILE)
        last = _i32(self.table.shape[1] - 1)
        pages = []
        for i in range(TILE // rows):
            at = tile * TILE + i * rows
            page = self.table[unit.chunk, jnp.minimum(lax.div(at, _i32(g.page)), last)] + self.now[1]
            offset = 0 if rows == g.page else pl.multiple_of(lax.rem(at, _i32(g.page)), TILE)
            pages.append((page * (2 * g.kv_heads) + unit.head, offset, i * rows))
        plgpu.barrier_wait(s.k_free.at[stage])
        for row, offset, to in pages:
            source = self.kv.at[row, pl.ds(offset, rows)]
            plgpu.copy_gmem_to_smem(source, s.k.at[stage, pl.ds(to, rows)], s.k_full.at[stage])
        plgpu.barrier_wait(s.v_free.at[stage])
        for row, offset, to in pages:
            for block in range(g.blocks):
                columns = pl.ds(block * g.columns, g.columns)
                source = self.kv.at[row + g.kv_heads, pl.ds(offset, rows), columns]
                plgpu.copy_gmem_to_smem(source, s.v.at[stage * g.blocks + block, pl.ds(to, rows)], s.v_full.at[stage])

    # ---- the warpgroups that compute

    def _compute(self, lane: Index) -> None:
        g, s = self.g, self.s
        plgpu.set_max_registers(g.registers[1], action="increase")
        for stage in range(g.stages):
            plgpu.barrier_arrive(s.k_free.at[stage])
            plgpu.barrier_arrive(s.v_free.at[stage])

        def unit(n: Index, unit: _Unit, before: Index) -> None:
            if g.by_columns:
                self._attend(lane, unit, before, _i32(0))
                return
            shared = unit.count > g.rows.tokens
            mine = shared | (lax.rem(n, _i32(LANES)) == lane)
            pl.when(mine)(lambda: self._attend(lane, unit, before, jnp.where(shared, lane * g.rows.tokens, 0)))
            pl.when(~mine)(lambda: self._pass(unit, before))

        self._each_unit(unit)

    def _pass(self, unit: _Unit, before: Index) -> None:
        """The other lane's unit."""

        def tile(i: Index, _: None) -> None:
            stage = self._stage(before + i)
            for full, free in ((self.s.k_full, self.s.k_free), (self.s.v_full, self.s.v_free)):
                plgpu.barrier_wait(full.at[stage])
                plgpu.barrier_arrive(free.at[stage])

        lax.fori_loop(_i32(0), unit.tiles, tile, None)

    def _attend(self, lane: Index, unit: _Unit, before: Index, skipped: Index) -> None:
        """The lane's tokens, behind the first `skipped`, over the unit's keys, split by split."""
        g, s = self.g, self.s
        per = _i32(split_tokens(g.longest) // TILE)
        row = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=LAYOUT.reduce(1))
        at = unit.position + skipped + lax.div(row, jnp.full_like(row, g.rows.packed))
        queries = self.q.at[unit.head, pl.ds((unit.token + skipped) * g.rows.packed, TILE), self._columns(lane)]
        s.q[lane] = plgpu.load(queries, layout=LAYOUT, optimized=False)
        plgpu.commit_smem()
        self._meet()

        _, total = s.out
        zero = _nothing(g.columns)
        total[lane] = zero.total

        def split(n: Index, carry: tuple[Row, Row]) -> tuple[Row, Row]:
            begin, end = jnp.maximum(n * per, unit.first), jnp.minimum((n + 1) * per, unit.last)

            def tile(i: Index, part: Sums) -> Sums:
                return self._tile(lane, unit, i, self._stage(before + i - unit.first), at, part)

            part = lax.fori_loop(begin, end, tile, zero)
            sums = _add(Sums(plgpu.load(total.at[lane], layout=LAYOUT), *carry), part)
            total[lane] = sums.total
            return sums.top, sums.norm

        splits = lax.div(unit.first, per), lax.div(unit.last + per - 1, per)
        top, norm = lax.fori_loop(*splits, split, (zero.top, zero.norm))
        self._meet()
        count = jnp.minimum(unit.count - skipped, g.rows.tokens)
        pl.when(unit.slot < 0)(lambda: self._write(lane, unit.head, unit.token + skipped, count, top, norm))
        pl.when(unit.slot >= 0)(lambda: self._keep(lane, unit.head, unit.slot, top, norm))

    def _columns(self, lane: Index) -> pl.Slice:
        return pl.ds(lane * self.g.columns if self.g.by_columns else 0, self.g.columns)

    def _meet(self) -> None:
        """Lanes that share the queries wait for each other: before they are read, and before they are overwritten."""
        if self.g.by_columns:
            plgpu.barrier_arrive(self.s.met)
            plgpu.barrier_wait(self.s.met)

    def _tile(self, lane: Index, unit: _Unit, i: Index, stage: Index, at: Positions, part: Sums) -> Sums:
        """One tile of keys, numbered `i` in the sequence, in place `stage` of the ring."""
        g, s = self.g, self.s
        scale = g.scale * self.per_head[unit.head, KEY_SCALE] if g.narrow else g.scale
        plgpu.barrier_wait(s.k_full.at[stage])
        scores = self._scaled(self._product(lane, stage), scale)
        plgpu.barrier_arrive(s.k_free.at[stage])
        key = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=LAYOUT)
        last = at - i * TILE
        seen = (key <= _across(last, key)) & (key > _across(last - self.now[2], key))
        scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.maximum(part.top, _whole(scores.max(axis=1)))
        by = jnp.exp2(part.top - top)
        weights = jnp.exp2(scores - _across(top, scores))
        norm = part.norm * by + weights.sum(axis=1)
        total = part.total * _across(by, part.total)
        plgpu.barrier_wait(s.v_full.at[stage])
        if g.narrow:
            values = self._widened(lane, self._values(lane, stage), self._own(unit, i, NARROW))
        else:
            self._clean(lane, unit, i, stage)
            values = self._values(lane, stage)
        total = self._weigh(total, weights.astype(g.dtype), values)
        plgpu.barrier_arrive(s.v_free.at[stage])
        return Sums(total, top, norm)

    def _product(self, lane: Index, stage: Index) -> Float[Array, "64 64"]:
        """Queries times keys. Lanes that share keys in 8 bits each widen one block of columns for both."""
        g, s = self.g, self.s
        if g.narrow:
            self._widened(lane, s.k.at[stage, :, self._columns(lane)])
            self._meet()

        def multiply(acc: Ref) -> Float[Array, "64 64"]:
            for block in range(g.blocks):
                place = block if g.by_columns else lane
                keys = s.wide.at[place] if s.wide is not None else s.k.at[stage, :, pl.ds(block * g.columns, g.columns)]
                plgpu.wgmma(acc, s.q.at[place], keys.transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((TILE, TILE), jnp.float32))
        if g.narrow:
            self._meet()
        return scores

    def _values(self, lane: Index, stage: Index) -> Ref:
        return self.s.v.at[stage * LANES + lane if self.g.by_columns else stage]

    def _widened(self, lane: Index, tile: Ref, own: Array | None = None) -> Ref:
        """A tile that came in 8 bits, in 16: exact, and in the lane's own place. Rows that are not `own` become zero.
        In pieces, to spare registers."""
        assert self.s.wide is not None
        wide = self.s.wide.at[lane]
        piece = self.g.piece
        plgpu.commit_smem()  # the whole warpgroup is done with what was there
        for at in range(0, self.g.columns, piece):
            columns = pl.ds(at, piece)
            bits = plgpu.load(tile.at[:, columns], layout=NARROW, optimized=False)
            floats = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
            wide[:, columns] = (floats if own is None else _masked(floats, own)).astype(self.g.dtype)
        plgpu.commit_smem()
        return wide

    def _scaled(self, scores: Float[Array, "64 64"], scale: float | Float[Array, ""]) -> Float[Array, "64 64"]:
        """In base two, capped where the model says so: tanh(x) = 1 - 2 / (1 + 2 ** (2 x log2 e))."""
        g = self.g
        if g.soft_cap is None:
            return scores * (scale * LOG2E)
        grown = jnp.exp2(scores * (2 * LOG2E * scale / g.soft_cap))
        cap = g.soft_cap * LOG2E
        return cap - (2 * cap) / (1.0 + grown)

    def _weigh(self, total: Float[Array, "64 columns"], weights: Float[Array, "64 64"], v: Ref) -> Array:
        if self.interpreted:  # jax's interpreter knows no wgmma with an operand in registers
            product = jnp.dot(weights, v[...], preferred_element_type=jnp.float32)
            plgpu.commit_smem()  # unlike wgmma's, this read is not ordered before the next copy
            return total + product

        def multiply(acc: Ref) -> None:
            plgpu.wgmma(acc, weights, v)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))

    def _own(self, unit: _Unit, i: Index, layout: plgpu.Layout) -> Array:
        """bool[64]: which keys of a tile lie before the sequence's end, and in the window of one of its tokens."""
        key = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=layout.reduce(1)) + i * TILE
        return (key >= self._low(unit.position)) & (key < unit.length)

    def _clean(self, lane: Index, unit: _Unit, i: Index, stage: Index) -> None:
        """Zeroes values behind the sequence's end and before the window: another owner may have left a NaN there,
        which a weight of zero would keep. Where the lanes share the values, the first one does it."""
        g, s = self.g, self.s
        low = self._low(unit.position)

        def clean() -> None:
            v = self._values(lane, stage)
            own = self._own(unit, i, LAYOUT)
            v[...] = _masked(plgpu.load(v, layout=LAYOUT), own)
            plgpu.commit_smem()

        @pl.when((i * TILE < low) | ((i + 1) * TILE > unit.length))
        def _() -> None:
            if g.by_columns:
                clean()
                return
            shared = unit.count > g.rows.tokens

            @pl.when(~shared | (lane == 0))
            def _() -> None:
                clean()
                pl.when(shared)(lambda: plgpu.barrier_arrive(s.v_clean.at[stage]))

            pl.when(shared & (lane == 1))(lambda: plgpu.barrier_wait(s.v_clean.at[stage]))

    def _write(self, lane: Index, head: Index, token: Index, count: Index, top: Row, norm: Row) -> None:
        g = self.g
        out, total = self.s.out
        sink = _sink(self.per_head, head) if g.sinks else None
        scale = self.per_head[head, VALUE_SCALE] if g.narrow else None
        value = _value(Sums(plgpu.load(total.at[lane], layout=LAYOUT), top, norm), sink, scale, g.dtype)
        plgpu.commit_smem()  # all have read before any of them writes to the same place
        out[lane, 0] = value
        plgpu.commit_smem()

        def one(t: Index, _: None) -> None:
            source = out.at[lane, 0, pl.ds(t * g.rows.packed, g.rows.group)]
            plgpu.copy_smem_to_gmem(source, self.out.at[token + t, head, :, self._columns(lane)])

        lax.fori_loop(_i32(0), count, one, None)
        plgpu.wait_smem_to_gmem(0)

    def _keep(self, lane: Index, head: Index, slot: Index, top: Row, norm: Row) -> None:
        g, s = self.g, self.s
        _, total = s.out
        s.stats[lane, 0] = top
        s.stats[lane, 1] = norm
        plgpu.commit_smem()
        place = self.sums.at[slot, head, :, self._columns(lane)]
        plgpu.copy_smem_to_gmem(total.at[lane, pl.ds(0, g.kept)], place)
        block = lane if g.by_columns else 0
        for i in range(2):
            plgpu.copy_smem_to_gmem(s.stats.at[lane, i, pl.ds(0, g.kept)], self.stats.at[slot, head, block, i])
        plgpu.wait_smem_to_gmem(0)


def attend(
    g: Geometry,
    q: Float[Array, "T N H"],
    kv: Float[Array, "pages 2 K page H"],
    table: Int[Array, "S P"],
    first: Index,
    window: Index,
    sinks: Float[Array, " N"] | None,
    scales: Float[Array, "2 K"] | None,
    plan: Schedule,
    places: int,
    interpret: plgpu.InterpretGPUParams | None,
) -> Float[Array, "T N H"]:
    """Runs the schedule, then adds the sums that went through memory."""
    tokens = q.shape[0]
    made = (
        jax.ShapeDtypeStruct((tokens, g.kv_heads, g.rows.group, g.size), g.dtype),
        jax.ShapeDtypeStruct((max(places, 1), g.kv_heads, g.kept, g.size), jnp.float32),
        jax.ShapeDtypeStruct((max(places, 1), g.kv_heads, g.blocks, 2, g.kept), jnp.float32),
    )
    now = jnp.stack([plan.count, first, window])
    per_head = _per_head(g, sinks, scales)
    parameters = plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0)

    def paged_attention(
        units: Ref,
        now: Ref,
        table: Ref,
        q: Ref,
        kv: Ref,
        per_head: Ref,
        out: Ref,
        sums: Ref,
        stats: Ref,
        /,
        **scratch: Ref,
    ) -> None:
        arrays = units, now, table, q, kv, per_head, out, sums, stats
        _Program(g, interpret is not None, *arrays, _Scratch(**scratch)).run()

    out, sums, stats = plgpu.kernel(
        paged_attention,
        out_type=made,
        scratch_types=_Scratch.types(g, interpret is not None),
        grid=(min(2 if interpret else PROGRAMS, plan.units.shape[0] * g.kv_heads),),
        grid_names=("program",),
        num_threads=LANES + 1,
        thread_name="warpgroup",
        compiler_params=parameters,
        interpret=interpret,
    )(plan.units, now, table, _query_rows(g, q), kv.reshape(-1, g.page, g.size), per_head)
    if places:
        out = jax.new_ref(out)
        _merge(g, plan, per_head, out, sums, stats, parameters, interpret)
        out = out[...]
    return out.reshape(q.shape)


def _query_rows(g: Geometry, q: Float[Array, "T N H"]) -> Float[Array, "K rows H"]:
    """A KV head's queries one below the other, token by token; the last unit's tiles reach beyond the last token."""
    q = q.reshape(-1, g.kv_heads, g.rows.group, g.size)
    q = jnp.pad(q, ((0, g.rows.per_unit), (0, 0), (0, g.rows.packed - g.rows.group), (0, 0)))
    return q.transpose(1, 0, 2, 3).reshape(g.kv_heads, -1, g.size)


def _per_head(
    g: Geometry, sinks: Float[Array, " N"] | None, scales: Float[Array, "2 K"] | None
) -> Float[Array, "K columns"]:
    """What a program reads of its KV head: the sink of each row, then, for a pool in 8 bits, the scales."""
    rows = jnp.zeros((g.kv_heads, TILE), jnp.float32)
    if sinks is not None:
        of_token = sinks.astype(jnp.float32).reshape(g.kv_heads, g.rows.group)
        rows = jnp.tile(jnp.pad(of_token, ((0, 0), (0, g.rows.packed - g.rows.group))), (1, g.rows.tokens))
    if not g.narrow:
        return rows
    scales = jnp.ones((2, g.kv_heads), jnp.float32) if scales is None else scales
    return jnp.concatenate([rows, scales.T], 1)


def _merge(
    g: Geometry,
    plan: Schedule,
    per_head: Float[Array, "K columns"],
    out: Ref,
    sums: Float[Array, "places K kept H"],
    stats: Float[Array, "places K blocks 2 kept"],
    parameters: plgpu.CompilerParams,
    interpret: plgpu.InterpretGPUParams | None,
) -> None:
    """Adds the sums of each chunk in the order of its splits, two of them in flight, and puts the result into `out`."""
    flight = 2

    def merge_sums(
        merges: Ref,
        per_head: Ref,
        out: Ref,
        sums: Ref,
        stats: Ref,
        totals: Ref,
        rows: Ref,
        result: Ref,
        total_full: Ref,
        rows_full: Ref,
    ) -> None:
        chunk, head, block = (lax.axis_index(name) for name in ("chunk", "head", "block"))
        count, first, token = (merges[chunk, i] for i in range(3))
        columns = pl.ds(block * g.columns, g.columns)

        def fetch(i: Index) -> None:
            to = lax.rem(i, _i32(flight))
            at = first + i
            plgpu.copy_gmem_to_smem(sums.at[at, head, :, columns], totals.at[to, pl.ds(0, g.kept)], total_full.at[to])
            for row in range(2):
                place = rows.at[to, row, pl.ds(0, g.kept)]
                plgpu.copy_gmem_to_smem(stats.at[at, head, block, row], place, rows_full.at[to])

        def add(i: Index, sum_: Sums) -> Sums:
            at = lax.rem(i, _i32(flight))
            plgpu.barrier_wait(total_full.at[at])
            plgpu.barrier_wait(rows_full.at[at])
            part = Sums(
                plgpu.load(totals.at[at], layout=LAYOUT),
                plgpu.load(rows.at[at, 0], layout=LAYOUT.reduce(1)),
                plgpu.load(rows.at[at, 1], layout=LAYOUT.reduce(1)),
            )
            sum_ = _add(sum_, part)
            plgpu.commit_smem()
            pl.when(i + flight < count)(lambda: fetch(i + flight))
            return sum_

        @pl.when(count > 0)
        def _() -> None:
            for i in range(flight):
                pl.when(i < count)(lambda i=i: fetch(_i32(i)))
            total = lax.fori_loop(_i32(0), count, add, _nothing(g.columns))
            sink = _sink(per_head, head) if g.sinks else None
            result[...] = _value(total, sink, per_head[head, VALUE_SCALE] if g.narrow else None, g.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result.at[pl.ds(0, g.rows.group)], out.at[token, head, :, columns])
            plgpu.wait_smem_to_gmem(0)

    plgpu.kernel(
        merge_sums,
        scratch_types=(
            plgpu.SMEM((flight, TILE, g.columns), jnp.float32, transforms=g.transforms(jnp.float32)),
            plgpu.SMEM((flight, 2, TILE), jnp.float32),
            plgpu.SMEM((TILE, g.columns), g.dtype),
            plgpu.Barrier(num_barriers=flight),
            plgpu.Barrier(num_arrivals=2, num_barriers=flight),
        ),
        grid=(plan.merges.shape[0], g.kv_heads, g.blocks),
        grid_names=("chunk", "head", "block"),
        compiler_params=parameters,
        interpret=interpret,
    )(plan.merges, per_head, out, sums, stats)
