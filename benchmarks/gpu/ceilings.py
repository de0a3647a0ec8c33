"""What this card does at most: a copy within its memory, and a large product of bfloat16 matrices."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.gpu.parts import Work
from benchmarks.gpu.record import COPY, PRODUCT, Row
from benchmarks.gpu.sizes import Size
from benchmarks.gpu.timing import seconds


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    yield Row(COPY, 2 * size.copied / seconds(_copying(size.copied), calls=3) / 1e9, "GB/s")
    rate = 2 * size.square**3 / seconds(_multiplying(size.square), calls=10) / 1e12
    yield Row(PRODUCT, rate, "TFLOP/s", note=f"{size.square} x {size.square}, random")


def _copying(count: int):
    """Reads and writes `count` bytes; adds one, so that it cannot be left out."""
    x = jax.random.bits(jax.random.key(0), (count // 4,), jnp.uint32)
    return _compiled(lambda x: x + 1, x)


def _multiplying(side: int):
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in (1, 2))
    return _compiled(jnp.matmul, a, b)


def _compiled(function, *arrays: jax.Array):
    program = jax.jit(function).lower(*arrays).compile()
    return lambda: program(*arrays)
