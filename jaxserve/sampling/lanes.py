"""The vocabulary as lanes, and reductions over it whose order is fixed by the program.

A row of V numbers becomes [G, DEPTH, L]: G groups of neighbours, in each L lanes of DEPTH numbers. A lane is added up
by DEPTH - 1 elementwise additions, lanes likewise, so the result of a row has the same bits whatever other rows there
are (XLA chooses the order of its own reductions by shape; only the last one here, over G numbers, is left to it). The
loops run over neighbours, which on a CPU is several times faster than asking XLA for a masked sum. Groups keep all this
local under tensor parallelism: where the ways divide G no lane crosses a shard, and what crosses is one number a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Num

DEPTH = 32
GROUPS = 48
"""G is the greatest common divisor of this and V, so the ways of tensor parallelism that stay local divide 48."""

WIDE = 4
"""L is a multiple of this, so that a GPU loads neighbours together; else a kernel runs out of registers and spills."""

Op = Callable[[Array, Array], Array]
Each = Callable[[Array], Array]


def spread(x: Num[Array, "S V"], fill: float) -> Num[Array, "S G D L"]:
    """The rows as lanes, computed once and kept. Lanes that V doesn't fill end in `fill`."""
    rows, size = x.shape
    groups, length = _shape(size)
    x = x.reshape(rows, groups, size // groups)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, DEPTH * length - size // groups)), constant_values=fill)
    return lax.optimization_barrier(x.reshape(rows, groups, DEPTH, length))


def ids(size: int) -> Int32[Array, "G D L"]:
    """Which of the V tokens `spread` puts where; V or more, or a neighbour's, where it puts `fill`."""
    groups, length = _shape(size)
    group = jnp.arange(groups, dtype=jnp.int32)[:, None, None] * (size // groups)
    return group + jnp.arange(DEPTH * length, dtype=jnp.int32).reshape(DEPTH, length)


def along(x: Num[Array, "*S G D L"], each: Each, op: Op) -> Num[Array, "*S G L"]:
    """Each lane's numbers, put through `each` and combined first to last: one pass that makes nothing as large."""
    parts = (each(x[..., d, :]) for d in range(DEPTH))
    return lax.optimization_barrier(reduce(op, parts))


def total(lanes: Num[Array, "*S G L"]) -> Num[Array, "*S"]:
    """The sum over lanes and groups."""
    while (length := lanes.shape[-1]) > 1:
        shorter = -(-length // DEPTH)
        space = [(0, 0)] * (lanes.ndim - 1) + [(0, DEPTH * shorter - length)]
        lanes = along(jnp.pad(lanes, space).reshape(*lanes.shape[:-1], DEPTH, shorter), lambda x: x, jnp.add)
    return jnp.sum(lanes[..., 0], axis=-1, dtype=lanes.dtype)


def first_max(x: Float[Array, "S G D L"], size: int) -> tuple[Float[Array, "S"], Int32[Array, "S"]]:
    """The largest number of each row and the lowest token that has it. jnp.argmax takes ten times as long on a CPU."""
    most = jnp.max(x, axis=(1, 2, 3))
    places = ids(size)
    parts = (jnp.where(x[:, :, d] == most[:, None, None], places[:, d], jnp.int32(size)) for d in range(DEPTH))
    return most, jnp.min(lax.optimization_barrier(reduce(jnp.minimum, parts)), axis=(1, 2))


def lane(x: Float32[Array, "S G D L"], index: Int32[Array, "S"]) -> Float32[Array, "S D"]:
    """One lane of each row; lanes are counted through the groups."""
    rows, _, _, length = x.shape
    return x[jnp.arange(rows), index // length, :, index % length]


def _shape(size: int) -> tuple[int, int]:
    groups = math.gcd(size, GROUPS)
    return groups, -(-(size // groups) // (DEPTH * WIDE)) * WIDE
