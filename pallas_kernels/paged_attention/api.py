"""The op as callers see it, and whether the kernel serves them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.units import Schedule, schedule, slots

if TYPE_CHECKING:
    from jax.experimental.pallas import mosaic_gpu as plgpu

SIZES = (64, 96, 128, 256)
PAGES = (16, 32, 64, 128)
DTYPES = (jnp.bfloat16, jnp.float16)
NARROW = jnp.uint8
"""What keys and values may come in instead of the queries' own type: float8_e4m3fn, by its bits."""
FAR = 1 << 30
"""A window that hides nothing."""


def supported(
    *, heads: int, kv_heads: int, size: int, page: int, dtype: jnp.dtype, kv_dtype: jnp.dtype, device: jax.Device
) -> str | None:
    """Why the kernel does not serve this, or None: it does. `heads` and `kv_heads` are those of one device."""
    if device.platform != "gpu":
        return f"the device is a {device.platform}, not an NVIDIA GPU"
    capability = float(getattr(device, "compute_capability", "0"))
    if not 9 <= capability < 10:
        return f"the GPU has compute capability {capability:g}; the kernel is written for 9 (Hopper)"
    return _unserved(heads, kv_heads, size, page, dtype, kv_dtype)


def _unserved(heads: int, kv_heads: int, size: int, page: int, dtype: jnp.dtype, kv_dtype: jnp.dtype) -> str | None:
    if heads % kv_heads:
        return f"{heads} query heads are not a multiple of {kv_heads} KV heads"
    if heads // kv_heads > 64:
        return f"{heads // kv_heads} query heads share a KV head; the kernel takes up to 64"
    if size not in SIZES:
        return f"heads of {size} are not one of {', '.join(map(str, SIZES))}"
    if page not in PAGES:
        return f"pages of {page} tokens are not one of {', '.join(map(str, PAGES))}"
    if jnp.dtype(dtype) not in map(jnp.dtype, DTYPES):
        return f"{jnp.dtype(dtype).name} is neither bfloat16 nor float16"
    if jnp.dtype(kv_dtype) not in (jnp.dtype(dtype), jnp.dtype(NARROW)):
        return f"keys and values in {jnp.dtype(kv_dtype).name} with queries in {jnp.dtype(dtype).name}"
    return None


def unit_tokens(group: int, size: int) -> int:
    """Tokens that a unit of the schedule holds where `group` query heads of `size` share a KV head."""
    return _kernel().Rows(group, size).per_unit


def paged_attention(
    q: Float[Array, "T N H"],
    kv: Float[Array, "pages 2 K page H"],
    starts: Int[Array, " S"],
    counts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    table: Int[Array, "S P"],
    first: Int[Array, ""] | int,
    *,
    window: Int[Array, ""] | int | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    kv_scales: Float[Array, "2 K"] | None = None,
    units: Schedule | None = None,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "T N H"]:
    """Attention of each token over its sequence up to itself, softmax in float32; tokens of no chunk give zeros.

    A token's bits depend on its query, its sequence and the table's width, on nothing else: not on the other chunks,
    nor on whether it comes alone or with many.

    Args:
        q: queries of the step's T tokens, bfloat16 or float16.
        kv: the pool, keys and values head by head; one array for all layers, read in place. In the queries' type, or
            uint8: the bits of float8_e4m3fn.
        starts, counts: chunk s holds tokens starts[s] .. starts[s] + counts[s] - 1; unused chunks have count 0.
            Chunks lie one behind the other from token 0 on.
        lengths: tokens of the sequence up to the chunk's end; their keys and values are in the pool.
        table: page of each `page` tokens of the sequence; entries behind its end must be pages too.
        first: added to every page number: where the layer's pages begin in the pool.
        window: a token sees so many tokens, itself included; None: all.
        scale: what scores are multiplied by.
        soft_cap: scores x become soft_cap * tanh(x / soft_cap).
        sinks: a score for each query head that takes part in the softmax and has no value.
        kv_scales: float32, what each head's keys and its values are multiplied by in a pool of uint8; None: 1.
        units: what `schedule` gave for these chunks; all layers share it, so it is worth computing once.
        interpret: runs on a CPU, in jax's interpreter.

    Raises:
        ValueError: a shape or dtype that the kernel does not serve.
    """
    reason = _unserved(q.shape[1], kv.shape[2], q.shape[2], kv.shape[3], q.dtype, kv.dtype)
    if reason is None and kv_scales is not None and kv.dtype != NARROW:
        reason = f"scales of keys and values in {kv.dtype.name}"
    if reason is not None:
        raise ValueError(f"the paged attention kernel does not serve this: {reason}; use the XLA path")
    (tokens, heads, size), (kv_heads, page) = q.shape, kv.shape[2:4]
    gpu = _kernel()
    g = gpu.Geometry(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        page=page,
        dtype=jnp.dtype(q.dtype),
        kv_dtype=jnp.dtype(kv.dtype),
        longest=table.shape[1] * page,
        scale=scale,
        soft_cap=soft_cap,
        sinks=sinks is not None,
    )
    if units is None:
        units = schedule(starts, counts, lengths, tokens=tokens, longest=g.longest, per_unit=g.rows.per_unit)
    return gpu.attend(
        g,
        q,
        kv,
        table.astype(jnp.int32),
        jnp.asarray(first, jnp.int32),
        jnp.asarray(FAR if window is None else window, jnp.int32),
        sinks,
        kv_scales,
        units,
        slots(len(starts), g.longest),
        interpret,
    )


def _kernel() -> ModuleType:
    """Imported by the first that needs it: with it comes a compiler for GPUs, of no use to a start on a CPU."""
    return importlib.import_module("pallas_kernels.paged_attention.gpu")
