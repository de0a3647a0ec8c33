"""Small programs for an H200 that break one rule of the gate each, and one that breaks none.

They prove that every rule can fail. The good one is a stack of layers in miniature: a scan over stacked weights with a
donated pool in its carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.chips import chips
from jaxserve.device import topology
from jaxserve.device.audit import Expected
from jaxserve.launching import GPU_OPTIONS

LAYERS, EMBED, WIDTH, ROWS = 4, 2048, 4096, 16
POOL = (LAYERS * 8, 2, 4, 16, 128)
BF16 = jnp.bfloat16

type Pair = tuple[Array, Array]
type Body = Callable[..., Pair]


@dataclass(frozen=True)
class Toy:
    """A program and what is expected of it."""

    lower: Callable[[], jax.stages.Lowered]
    expected: Expected
    options: dict[str, object]


def _layer(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    """Writes a row of the pool in place, multiplies twice."""
    pool = lax.dynamic_update_slice(pool, x[:1, :128].reshape(1, 1, 1, 1, 128), (index * 8, 0, 0, 0, 0))
    return x + jax.nn.silu(x @ up) @ down, pool


def _upcast(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    wide = jnp.matmul(x.astype(jnp.float32), up.astype(jnp.float32), precision="highest")
    return x + jax.nn.silu(wide).astype(BF16) @ down, pool


def _transposing(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    """A weight that is changed before it is used is written out."""
    return x + jax.nn.silu(x @ up) @ jnp.sin(down), pool


def _of_unknown_length(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    y, pool = _layer(x, pool, up, down, index)
    turns = jnp.max(y).astype(jnp.int32)
    return lax.fori_loop(0, turns, lambda _, y: jnp.sort(y, axis=0), y), pool


def _with_branch(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    y, pool = _layer(x, pool, up, down, index)

    def search(y: Array) -> Array:
        return lax.fori_loop(0, 30, lambda _, y: jnp.sort(y * 2, axis=0), y)

    return lax.cond(jnp.max(y) > 0, search, lambda y: y, y), pool


def _gathering(mesh: Mesh) -> Body:
    def layer(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
        wide = lax.with_sharding_constraint(jax.nn.silu(x @ up), NamedSharding(mesh, P()))
        return x + jnp.sort(wide, axis=1) @ down, pool

    return layer


def _run(layer: Body, up: Array, down: Array, x: Array, pool: Array) -> Pair:
    def one(carry: Pair, item: tuple[Array, ...]) -> tuple[Pair, None]:
        return layer(*carry, *item), None

    return lax.scan(one, (x, pool), (up, down, jnp.arange(LAYERS)))[0]


def _run_over_pool(up: Array, down: Array, x: Array, pool: Array) -> Pair:
    """The pool goes through the scan as input and output."""

    def one(x: Array, item: tuple[Array, ...]) -> Pair:
        part, up, down = item
        return _layer(x, part, up, down, jnp.zeros((), jnp.int32))

    x, parts = lax.scan(one, x, (pool.reshape(LAYERS, 8, *POOL[1:]), up, down))
    return x, parts.reshape(POOL)


def _run_wasting(up: Array, down: Array, x: Array, pool: Array) -> Pair:
    x, pool = _run(_layer, up, down, x, pool)
    large = jnp.sort(jnp.sin(jnp.arange(2**27, dtype=jnp.float32)))
    return x + large[0].astype(BF16), pool


def _run_to_host(up: Array, down: Array, x: Array, pool: Array) -> Pair:
    x, pool = _run(_layer, up, down, x, pool)
    return jax.device_put(x, jax.memory.Space.Host), pool


def _run_spilling(up: Array, down: Array, x: Array, pool: Array) -> Pair:
    """A kernel that keeps more in registers than there are."""
    x, pool = _run(_layer, up, down, x, pool)

    def kernel(source, target) -> None:
        parts = [source[...] * float(n) for n in range(1, 9)]
        for n, part in enumerate(parts):
            target[...] = target[...] + part * jnp.sum(parts[n - 1])

    square = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    spilling = plgpu.kernel(kernel, out_type=square, grid=(1,), grid_names=("one",))
    return x + spilling(jnp.broadcast_to(x[:1, :128].astype(jnp.float32), (128, 128)))[0, 0].astype(BF16), pool


def toys() -> dict[str, Toy]:
    """By name."""
    one, four = topology.mesh(chips()["h200"], 1), topology.mesh(chips()["h200"], 4)
    triton = {**GPU_OPTIONS, "xla_gpu_enable_triton_gemm": True}
    return {
        "good": _toy(partial(_run, _layer), one),
        "good on four": _toy(partial(_run, _two_products), four),
        "Triton multiplies": _toy(partial(_run, _layer), one, options=triton),
        "weight is changed": _toy(partial(_run, _transposing), one),
        "weight is upcast": _toy(partial(_run, _upcast), one),
        "large temporary": _toy(_run_wasting, one),
        "pool not donated": _toy(partial(_run, _layer), one, donated=()),
        "pool not carried": _toy(_run_over_pool, one),
        "memory of the host": _toy(_run_to_host, one, kept="pinned_host"),
        "loop of unknown length": _toy(partial(_run, _of_unknown_length), one),
        "branch with a loop": _toy(partial(_run, _with_branch), one),
        "gathers": _toy(partial(_run, _gathering(four)), four),
        "spills": _toy(_run_spilling, one),
    }


def _two_products(x: Array, pool: Array, up: Array, down: Array, index: Array) -> Pair:
    """Two pairs of products a layer, like attention and mlp: two all-reduces where the width is split."""
    y, pool = _layer(x, pool, up, down, index)
    return _layer(y, pool, up, down, index)


def _toy(
    run: Callable[..., Pair],
    mesh: Mesh,
    *,
    donated: tuple[int, ...] = (3,),
    kept: str = "device",
    options: dict[str, object] | None = None,
) -> Toy:
    def place(*spec: str | None) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    args = (
        jax.ShapeDtypeStruct((LAYERS, EMBED, WIDTH), BF16, sharding=place(None, None, "tensor")),
        jax.ShapeDtypeStruct((LAYERS, WIDTH, EMBED), BF16, sharding=place(None, "tensor", None)),
        jax.ShapeDtypeStruct((ROWS, EMBED), BF16, sharding=place()),
        jax.ShapeDtypeStruct(POOL, BF16, sharding=place(None, None, "tensor")),
    )
    up, down, pool = (tuple(a.sharding.shard_shape(a.shape)) for a in (args[0], args[1], args[3]))
    part = 2 * EMBED * WIDTH // mesh.size
    expected = Expected(
        weights={up: part, down: part},
        pools=frozenset({pool}),
        pool_bytes=2 * pool[0] * pool[1] * pool[2] * pool[3] * pool[4],
        activation=2 * ROWS * WIDTH,
        flops=2 * ROWS * 2 * LAYERS * EMBED * WIDTH // mesh.size,
        all_reduces=2 * LAYERS if mesh.size > 1 else 0,
    )
    program = jax.jit(run, donate_argnums=donated, out_shardings=(place().with_memory_kind(kept), args[3].sharding))
    return Toy(lambda: program.lower(*args), expected, options or dict(GPU_OPTIONS))
