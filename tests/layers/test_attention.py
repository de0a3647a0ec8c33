"""Paged attention against the textbook sum over each sequence, for every way a token can come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.layers import attention
from jaxserve.layers.attention import TILE, Batch

PAGE, KV_HEADS, GROUP, HEAD, PAGES = 16, 2, 3, 8, 64
RNG = np.random.default_rng(0)


def batch(lengths: Sequence[int], counts: Sequence[int], tokens: int, rows: int) -> Batch:
    """Sequences of these lengths, of which the last `counts` tokens are in the step; pages in scattered order."""
    order = RNG.permutation(np.arange(1, PAGES))
    table = np.zeros((rows, 4 * TILE // PAGE), np.int32)
    slots = np.full(tokens, np.iinfo(np.int32).max, np.int32)
    starts, given, used, at = np.zeros(rows, np.int32), np.zeros(rows, np.int32), 0, 0
    ends = np.zeros(rows, np.int32)
    for s, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        need = -(-length // PAGE)
        table[s, :need] = order[used : used + need]
        used += need
        starts[s], given[s], ends[s] = at, count, length
        for i, position in enumerate(range(length - count, length)):
            slots[at + i] = table[s, position // PAGE] * PAGE + position % PAGE
        at += count
    starts[len(lengths) :] = at
    chunk, positions = np.zeros(tokens, np.int32), np.full(tokens, -1, np.int32)
    chunk[:at] = np.repeat(np.arange(rows), given)
    positions[:at] = np.arange(at) - starts[chunk[:at]] + (ends - given)[chunk[:at]]
    return Batch(*(jnp.asarray(x) for x in (starts, given, ends, table, slots, chunk, positions)))


def textbook(q: np.ndarray, kv: np.ndarray, b: Batch, window: int | None) -> np.ndarray:
    """f64[T, N, H]"""
    out = np.zeros(q.shape)
    for s in range(len(b.counts)):
        length, count, start = int(b.lengths[s]), int(b.counts[s]), int(b.starts[s])
        pages = np.asarray(b.table)[s, : -(-length // PAGE)] if count else []
        if not count:
            continue
        mine = kv[pages].transpose(0, 3, 1, 2, 4).reshape(-1, 2, KV_HEADS, HEAD)[:length].astype(np.float64)
        for i in range(count):
            at = length - count + i
            low = 0 if window is None else max(0, at - window + 1)
            for n in range(q.shape[1]):
                keys, values = mine[low : at + 1, 0, n // GROUP], mine[low : at + 1, 1, n // GROUP]
                scores = keys @ q[start + i, n].astype(np.float64) * HEAD**-0.5
                p = np.exp(scores - scores.max())
                out[start + i, n] = p @ values / p.sum()
    return out


STEPS = {
    "one token": ([1], [1]),
    "page - 1, page, page + 1": ([PAGE - 1, PAGE, PAGE + 1], [1, 1, 1]),
    "tile - 1, tile, tile + 1": ([TILE - 1, TILE, TILE + 1], [1, 1, 1]),
    "a prompt": ([70], [70]),
    "a chunk": ([200], [33]),
    "mixed": ([150, 40, 9, 129], [1, 40, 3, 1]),
    "nothing": ([], []),
    "wide tiles and a rest": ([300, 400, 2], [300, 80, 2]),
}


STATIC = ("scale", "uniform", "window", "kernels")


def attend(q: np.ndarray, kv: np.ndarray, b: Batch, first: int = 0, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """What the step's tokens get, and the pool after it. The pool has NaN where `kv` has their keys and values."""
    slots, positions = np.asarray(b.slots), np.asarray(b.positions)
    pages, offsets = first + slots[positions >= 0] // PAGE, slots[positions >= 0] % PAGE
    new = np.zeros((len(slots), 2, KV_HEADS, HEAD), kv.dtype)
    new[positions >= 0] = kv[pages, :, :, offsets]
    before = kv.copy()
    before[pages, :, :, offsets] = np.nan
    run = jax.jit(attention.attend, static_argnames=STATIC)
    out, after = run(q, new[:, 0], new[:, 1], before, b, jnp.int32(first), **options)
    return np.where(positions[:, None, None] < 0, 0, out), np.asarray(after)


@pytest.fixture(scope="module", params=["xla", "native"])
def kernels(request, tmp_path_factory) -> native.Kernels | None:
    if request.param == "xla":
        return None
    try:
        return native.load(HEAD, GROUP, tmp_path_factory.mktemp("native"))
    except native.NativeError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("window", [None, 1, 20, 140])
@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_equals_the_textbook(kernels, step: str, uniform: bool, window: int | None) -> None:
    lengths, counts = STEPS[step]
    rows = 6
    tokens = 80 if sum(counts) <= 80 else 400
    b = batch(lengths, counts, tokens, rows)
    kv = RNG.normal(size=(2 * PAGES, 2, KV_HEADS, PAGE, HEAD)).astype(np.float32)
    q = RNG.normal(size=(tokens, KV_HEADS * GROUP, HEAD)).astype(np.float32)
    first = PAGES
    got, after = attend(q, kv, b, first, window=window, scale=HEAD**-0.5, uniform=uniform, kernels=kernels)
    np.testing.assert_allclose(got, textbook(q, kv[first:], b, window), atol=1e-5)
    np.testing.assert_array_equal(after, kv)


def test_what_others_left_behind_the_end_does_not_matter(kernels) -> None:
    """Not even NaN: pages are reused as they are."""
    b = batch([PAGE + 3, 5], [1, 5], 8, 4)
    kv = RNG.normal(size=(PAGES, 2, KV_HEADS, PAGE, HEAD)).astype(np.float32)
    q = RNG.normal(size=(8, KV_HEADS * GROUP, HEAD)).astype(np.float32)
    dirty = kv.copy()
    dirty[np.asarray(b.table)[0, 1], :, :, 3:] = np.nan
    dirty[np.asarray(b.table)[1, 0], :, :, 5:] = np.nan
    dirty[0] = np.nan
    clean, other = (attend(q, pool, b, window=None, scale=1.0, kernels=kernels)[0] for pool in (kv, dirty))
    np.testing.assert_array_equal(clean, other)


@pytest.mark.parametrize("window", [None, 20, 140])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_native_kernel_gives_a_token_the_same_bits_however_it_comes_in(kernels, dtype, window: int | None) -> None:
    """As part of a prompt, and alone."""
    if kernels is None:
        pytest.skip("XLA's attention promises it where `uniform` is asked for")
    length, count, options = 300, 200, {"window": window, "scale": HEAD**-0.5, "kernels": kernels}
    b = batch([length], [count], count, 1)
    kv = RNG.normal(size=(PAGES, 2, KV_HEADS, PAGE, HEAD)).astype(dtype)
    q = RNG.normal(size=(count, KV_HEADS * GROUP, HEAD)).astype(dtype)
    together = attend(q, kv, b, **options)[0]
    for i in (0, 7, 100, count - 1):
        position = length - count + i
        one = dataclasses.replace(
            b,
            counts=jnp.ones(1, jnp.int32),
            lengths=jnp.full(1, position + 1, jnp.int32),
            slots=b.slots[i : i + 1],
            positions=b.positions[i : i + 1],
        )
        np.testing.assert_array_equal(attend(q[i : i + 1], kv, one, **options)[0], together[i : i + 1])


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("step", ["page - 1, page, page + 1", "mixed"])
def test_8_bits_equal_the_textbook_on_what_they_stand_for(kernels, step: str, uniform: bool) -> None:
    """Every bit pattern but NaN's, with scales; NaN where no sequence looks."""
    b = batch(*STEPS[step], 80, 6)
    patterns = np.array([i for i in range(256) if i & 127 != 127], np.uint8)
    pool = RNG.choice(patterns, size=(PAGES, 2, KV_HEADS, PAGE, HEAD))
    scales = np.array([[0.01, 0.03], [0.5, 2.0]], np.float32)
    kv = pool.view(attention.FLOAT8).astype(np.float32) * scales[:, :, None, None]
    pool[0] = 127
    q = RNG.normal(size=(80, KV_HEADS * GROUP, HEAD)).astype(np.float32)
    run = jax.jit(attention.paged_attention, static_argnames=("scale", "uniform", "window"))
    got = run(q, pool, b, jnp.int32(0), scales=scales, window=None, scale=HEAD**-0.5, uniform=uniform)
    got = np.where(np.asarray(b.positions)[:, None, None] < 0, 0, got)
    np.testing.assert_allclose(got, textbook(q, kv, b, None), rtol=1e-4, atol=1e-3)


def test_append_in_8_bits_scales_rounds_and_saturates() -> None:
    kv = jnp.zeros((2, 2, KV_HEADS, PAGE, HEAD), jnp.uint8)
    k, v = (RNG.normal(size=(3, KV_HEADS, HEAD)).astype(np.float32) for _ in range(2))
    k[1], v[2] = 1e6, -1e6
    scales = np.array([[0.5, 2.0], [0.25, 1.0]], np.float32)
    slots = np.array([PAGE + 3, PAGE + 4, 1])
    pool = np.asarray(attention.append(kv, k, v, slots, scales))
    flat = pool.view(attention.FLOAT8).astype(np.float32).transpose(0, 3, 1, 2, 4).reshape(-1, 2, KV_HEADS, HEAD)
    for part, given in enumerate((k, v)):
        scaled = given / scales[part][:, None]
        want = np.clip(scaled, -448, 448)
        np.testing.assert_allclose(flat[slots, part], want, rtol=1 / 16, atol=2**-10)
    assert (flat[slots[1], 0] == 448).all() and (flat[slots[2], 1] == -448).all()
    assert np.count_nonzero(np.delete(flat, slots, 0)) == 0


def test_8_bits_change_in_place() -> None:
    """XLA would convert a pool of 8-bit floats as a whole, on the CPU; one of integers it leaves where it is."""
    page = (2, KV_HEADS, PAGE, HEAD)
    pool, new = jax.ShapeDtypeStruct((PAGES, *page), jnp.uint8), jax.ShapeDtypeStruct((4, KV_HEADS, HEAD), jnp.float32)
    made = jax.jit(attention.append, donate_argnums=0).lower(pool, new, new, jax.ShapeDtypeStruct((4,), jnp.int32))
    memory = made.compile().memory_analysis()
    assert memory.alias_size_in_bytes == pool.size
    assert memory.temp_size_in_bytes < pool.size // 8


def test_append_writes_the_tokens_slots_and_nothing_else() -> None:
    b = batch([PAGE + 2], [4], 6, 2)
    kv = jnp.zeros((PAGES, 2, KV_HEADS, PAGE, HEAD))
    k, v = (RNG.normal(size=(6, KV_HEADS, HEAD)).astype(np.float32) for _ in range(2))
    flat = np.asarray(attention.append(kv, k, v, b.slots)).transpose(0, 3, 1, 2, 4).reshape(-1, 2, KV_HEADS, HEAD)
    slots = np.asarray(b.slots)[:4]
    np.testing.assert_array_equal(flat[slots, 0], k[:4])
    np.testing.assert_array_equal(flat[slots, 1], v[:4])
    assert np.count_nonzero(np.delete(flat, slots, 0)) == 0
