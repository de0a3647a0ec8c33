"""Paged attention by itself: against the float32 reference on random inputs, then its bandwidth and rate.

Without a GPU the kernel is checked in jax's interpreter, and the reference is timed in its place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.gpu.parts import Work, each
from benchmarks.gpu.record import Piece, Row
from benchmarks.gpu.sizes import BF16, Size
from benchmarks.gpu.timing import seconds
from pallas_kernels import paged_attention as op
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.cases import FULL, MODELS, SMALL, Case

TOLERANCE = 1e-2
"""Of |out - reference| / |reference|, for 16-bit floats."""
MIXED = (*((1, length) for length in (1, 15, 17, 255, 257, 700, 1024)), (100, 100), (130, 600), (64, 1024))
"""Chunks of all kinds; few tokens, for the reference looks at every key for each."""
ROTATED = 2**28
"""Bytes of KV that calls in a row go through at least, so that none finds its keys in the L2 cache."""
CALLS = 20

Attend = Callable[..., jax.Array]
REFERENCE: Attend = reference.paged_attention


@dataclass(frozen=True)
class Kernel:
    """What is measured. `clocked` is what stands for the kernel when time is taken."""

    attend: Attend
    clocked: Attend
    scheduled: bool
    """`clocked` takes its units of work, made once for all layers."""


def measure(size: Size, work: Work, argument: str) -> Iterator[Row]:
    if jax.default_backend() == "gpu":
        kernel = Kernel(op.paged_attention, op.paged_attention, scheduled=True)
    else:
        interpreted = functools.partial(op.paged_attention, interpret=plgpu.InterpretGPUParams())
        kernel = Kernel(interpreted, REFERENCE, scheduled=False)
    yield from each(
        [
            *(functools.partial(check, name, case, kernel.attend) for name, case in checked(size).items()),
            *(functools.partial(clock, name, case, kernel) for name, case in clocked(size).items()),
        ]
    )


def checked(size: Size) -> Mapping[str, Case]:
    if size.name == "toy":
        return {"decoding beside two prompts": SMALL["decoding beside two prompts"]}
    models = {
        f"mixed, {name}": dataclasses.replace(FULL[f"{name}: prefill 2k"], chunks=MIXED, longest=1024)
        for name in MODELS
    }
    return models | {name: case for name, case in SMALL.items() if case.chunks}


def clocked(size: Size) -> Mapping[str, Case]:
    if size.name == "toy":
        return {"decode": Case(((1, 24),), longest=32)}
    beside = dataclasses.replace(FULL["Llama-3.1-8B: decode 32 at 1k"], chunks=((1, 1024),) * 32 + ((1024, 1024),))
    ours = {name: case for name, case in FULL.items() if name.startswith("Llama-3.1-8B")}
    return ours | {"Llama-3.1-8B: a prompt of 1k beside 32": beside}


def least(case: Case) -> Piece:
    """Queries and keys read once, the result written once."""
    kv = sum(length for _, length in case.chunks) * 2 * case.kv_heads * case.size
    q = case.tokens * case.heads * case.size
    seen = sum(count * (length - (count - 1) / 2) for count, length in case.chunks)
    return Piece(bytes=(kv + 2 * q) * BF16, flops=4 * seen * case.heads * case.size)


def check(name: str, case: Case, attend: Attend) -> Iterator[Row]:
    """How far the kernel is from the reference, which has the same inputs in float32.

    Raises:
        RuntimeError: farther than the tolerance.
    """
    arrays = case.arrays(seed=1)
    wide = arrays | {part: arrays[part].astype(jnp.float32) for part in ("q", "kv") if arrays[part].dtype != jnp.uint8}
    out = jax.jit(lambda a: attend(**a, **case.options()))(arrays)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(lambda a: REFERENCE(**a, **case.options()))(wide)
    error = float(jnp.linalg.norm(out - want) / jnp.linalg.norm(want))
    note = f"{case.heads}/{case.kv_heads} heads of {case.size}, {case.dtype}"
    yield Row(f"error, {name}", error, "", note=note)
    if not error <= TOLERANCE:
        raise RuntimeError(f"{name}: the kernel is {error:.2e} from the reference, more than {TOLERANCE}")


def clock(name: str, case: Case, kernel: Kernel) -> Iterator[Row]:
    """Of one layer: calls follow each other in one program, each through another layer's pages."""
    of_layer = case.pages * case.page * 2 * case.kv_heads * case.size * BF16
    layers = min(max(2, -(-ROTATED // of_layer)), 64)
    shapes = case.abstract()
    arrays = dataclasses.replace(case, heads=1, kv_heads=1).arrays()  # for the places only, which heads do not change
    arrays["q"] = _normal(*shapes["q"].shape, dtype=shapes["q"].dtype)
    arrays["kv"] = _normal(layers * case.pages, *shapes["kv"].shape[1:], dtype=shapes["kv"].dtype)
    program = jax.jit(functools.partial(calls, case, kernel, layers)).lower(arrays).compile()
    taken = seconds(lambda: program(arrays), calls=2) / CALLS
    piece = least(case)
    note = f"{piece.bytes / taken / 1e9:.0f} GB/s, {piece.flops / taken / 1e12:.1f} TFLOP/s"
    yield Row(f"attention of a layer, {name}", taken * 1e6, "us", taken, (piece,), note)


def _normal(*shape: int, dtype: jnp.dtype) -> jax.Array:
    return jax.jit(lambda: jax.random.normal(jax.random.key(0), shape, dtype))()


def calls(case: Case, kernel: Kernel, layers: int, arrays: dict[str, jax.Array]) -> jax.Array:
    """`CALLS` calls. Each one's result is the next one's queries, so none can be left out."""
    fixed = {name: arrays[name] for name in ("kv", "starts", "counts", "lengths", "table")}
    units: dict[str, object] = {}
    if kernel.scheduled:
        per_unit = op.unit_tokens(case.heads // case.kv_heads, case.size)
        where = (arrays["starts"], arrays["counts"], arrays["lengths"])
        units["units"] = op.schedule(*where, tokens=case.tokens, longest=case.longest, per_unit=per_unit)

    def call(i: jax.Array, q: jax.Array) -> jax.Array:
        first = i % layers * np.int32(case.pages)
        return kernel.clocked(q, **fixed, first=first, **case.options(), **units)

    return lax.fori_loop(0, CALLS, call, arrays["q"])
