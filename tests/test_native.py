"""The native kernels: products against plain sums, what they do not take, and how they are made."""

from __future__ import annotations

import dataclasses
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve import native
from jaxserve.layers.linear import Linear
from jaxserve.weights import leaf
from jaxserve.weights.int8 import Int8Weight
from jaxserve.weights.native import NativeInt8Weight, NativeWeight, in_place
from jaxserve.weights.quantization import quantise

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("native")


@pytest.fixture(scope="module")
def kernels(folder) -> native.Kernels:
    try:
        return native.load(16, 2, folder)
    except native.NativeError as error:
        pytest.skip(str(error))


def draw(*shape: int, dtype: jnp.dtype = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


def product(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64).T


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 100])
@pytest.mark.parametrize(("depth", "out"), [(32, 16), (96, 48), (64, 112)])
def test_a_product_is_the_sum_over_one_layer(kernels, rows: int, depth: int, out: int) -> None:
    x, w = draw(rows, depth), draw(3, out, depth)
    run = jax.jit(native.multiply, static_argnames="dtype")
    for layer in range(3):
        got = run(x, w, jnp.int32(layer), dtype=jnp.float32)
        np.testing.assert_allclose(got, product(x, w[layer]), rtol=1e-5, atol=1e-4)
        narrow = run(x, w, jnp.int32(layer), dtype=jnp.bfloat16)
        np.testing.assert_array_equal(narrow, got.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 17, 33, 64, 100])
def test_a_gated_product_joins_its_halves(kernels, rows: int, dtype: jnp.dtype) -> None:
    """For gates of all sizes, and to the bit the same in company as alone."""
    if rows > kernels.multiplies(64, 96, dtype):
        pytest.skip("this processor multiplies fewer rows")
    x, w = draw(rows, 64, dtype=dtype) * 4, draw(2, 96, 64, dtype=dtype)
    run = jax.jit(native.multiply, static_argnames=("dtype", "gated"))
    got = run(x, w, jnp.int32(1), dtype=jnp.float32, gated=True)
    gate, up = np.split(product(x, w[1]), 2, axis=1)
    np.testing.assert_allclose(got, gate / (1 + np.exp(-gate)) * up, rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(got[-1:], run(x[-1:], w, jnp.int32(1), dtype=jnp.float32, gated=True))


@pytest.mark.parametrize("rows", [1, 2, 16, 33, 100])
def test_a_float32_product_is_the_sum_over_one_layer(kernels, rows: int) -> None:
    if not kernels.float32_rows:
        pytest.skip("this processor has no AVX-512")
    x, w = draw(rows, 96, dtype=jnp.float32), draw(2, 48, 96, dtype=jnp.float32)
    got = jax.jit(native.multiply, static_argnames="dtype")(x, w, jnp.int32(1), dtype=jnp.float32)
    np.testing.assert_allclose(got, product(x, w[1]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16, 33, 64, 100])
def test_an_int8_product_is_exact(kernels, rows: int, dtype: jnp.dtype) -> None:
    """What both factors are rounded to is multiplied without an error."""
    if not kernels.int8_rows:
        pytest.skip("this processor has neither AVX-512 nor AMX")
    x, w = draw(rows, 128, dtype=dtype).at[0].set(0), Int8Weight.of(draw(48, 128), ("mlp", "embed"))
    run = jax.jit(native.multiply_int8, static_argnames="dtype")
    got = run(x, w.values[None], w.scales, jnp.int32(0), dtype=jnp.float32)
    values, scales = (np.asarray(a) for a in (w.values, w.scales))
    wide = np.asarray(x, np.float32)
    largest = np.abs(wide).max(axis=1)
    x_scales = np.where(largest == 0, np.float32(1), largest / np.float32(127))
    sums = np.rint(wide / x_scales[:, None]).astype(np.int64) @ values.astype(np.int64).T
    np.testing.assert_array_equal(got, sums.astype(np.float32) * (x_scales[:, None] * scales))


def test_an_int8_product_of_what_is_not_finite_is_not(kernels) -> None:
    if not kernels.int8_rows:
        pytest.skip("this processor has neither AVX-512 nor AMX")
    x, w = draw(3, 128).at[1, 5].set(jnp.nan).at[2, 100].set(jnp.inf), Int8Weight.of(draw(48, 128), ("mlp", "embed"))
    got = native.multiply_int8(x, w.values[None], w.scales, jnp.int32(0), jnp.float32)
    assert np.isfinite(got[0]).all() and not np.isfinite(got[1:]).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_does_not_depend_on_the_others(kernels, dtype: jnp.dtype) -> None:
    if not kernels.multiplies(96, 32, dtype):
        pytest.skip("this processor has neither AVX-512 nor AMX")
    x, w = draw(70, 96, dtype=dtype), draw(1, 32, 96, dtype=dtype)
    run = jax.jit(native.multiply, static_argnames="dtype")
    whole = run(x, w, jnp.int32(0), dtype=jnp.float32)
    for some in (slice(0, 1), slice(3, 5), slice(8, 12), slice(20, 25), slice(5, 25), slice(69, 70)):
        np.testing.assert_array_equal(whole[some], run(x[some], w, jnp.int32(0), dtype=jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
@pytest.mark.parametrize("zeros", [1, 15, 16, 20, 40, 70])
def test_zeros_at_the_end_give_zeros(kernels, zeros: int, dtype: jnp.dtype) -> None:
    if not kernels.multiplies(64, 96, dtype):
        pytest.skip("this processor has neither AVX-512 nor AMX")
    x, w = draw(70, 64).at[70 - zeros :].set(0), draw(96, 64)
    if dtype == jnp.int8:
        leaf8 = Int8Weight.of(w, ("mlp", "embed"))
        got = native.multiply_int8(x, leaf8.values[None], leaf8.scales, jnp.int32(0), jnp.float32)
        np.testing.assert_allclose(got, product(x, w), atol=0.5)
    else:
        got = native.multiply(x.astype(dtype), w.astype(dtype)[None], jnp.int32(0), jnp.float32)
        np.testing.assert_allclose(got, product(x, w), rtol=1e-5, atol=1e-4)
    assert not np.any(got[70 - zeros :]) and np.all(np.any(got[: 70 - zeros], axis=1))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        keys = {"rngs": rngs, "dtype": jnp.bfloat16}
        self.wide = Linear(64, (2, 16), (None, "mlp", "embed"), bias=True, **keys)
        self.odd = Linear(24, (16,), ("mlp", "embed"), **keys)
        self.narrow = Linear(64, (2, 24), (None, "mlp", "embed"), **keys)
        self.gain = leaf.gain(64, jnp.float32)

    def gated(self, x: jax.Array) -> jax.Array:
        return leaf.project_gated(x, self.wide.w)


def test_what_the_kernel_does_not_take_stays_an_array(kernels) -> None:
    kernels = dataclasses.replace(kernels, rows=8)
    model = Model(nnx.Rngs(0))
    found = in_place(model, kernels)
    assert isinstance(found.wide.w.get_value(), NativeWeight)
    assert not isinstance(found.odd.w.get_value(), NativeWeight), "24 is no multiple of what the kernel reads at once"
    assert all(a is b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(found), strict=True))
    half = nnx.eval_shape(lambda: Linear(64, (16,), ("mlp", "embed"), rngs=nnx.Rngs(0), dtype=jnp.float16))
    assert not isinstance(in_place(half, kernels).w.get_value(), NativeWeight)


@pytest.mark.parametrize("rows", [3, 9, 16])
def test_a_native_int8_weight_is_the_leaf_to_the_model(kernels, rows: int) -> None:
    """But for rounding: XLA may divide by a scale in another way, and a gate is joined before it is rounded."""
    model = quantise(Model(nnx.Rngs(0)), "int8")
    found = in_place(model, kernels)
    assert isinstance(found.wide.w.get_value(), NativeInt8Weight) == bool(kernels.int8_rows)
    x = draw(rows, 64)
    pairs = (
        (found.wide(x), model.wide(x)),
        (found.gated(x), model.gated(x)),
        (found.narrow.gated(x), model.narrow.gated(x)),
    )
    for got, want in pairs:
        assert got.shape == want.shape and got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [3, 9])
def test_a_native_weight_is_the_array_to_the_model(kernels, rows: int) -> None:
    """Below and above the rows that the kernel is for."""
    model = Model(nnx.Rngs(0))
    x = draw(rows, 64)
    found = in_place(model, dataclasses.replace(kernels, rows=8))
    assert isinstance(found.narrow.w.get_value(), NativeWeight), "48 outputs fit, 24 for each half do not"
    pairs = (
        (found.wide(x), model.wide(x)),
        (found.gated(x), model.gated(x)),
        (found.narrow.gated(x), model.narrow.gated(x)),
    )
    for got, want in pairs:
        assert got.shape == want.shape and got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=0.02, atol=0.02)


def test_a_library_is_compiled_once(kernels, tmp_path) -> None:
    """By a process, and by all that come after it."""
    assert native.load(16, 2, tmp_path) == kernels and not list(tmp_path.iterdir()), "this process has it"
    code = "import sys, pathlib; from jaxserve import native; native.load(16, 2, pathlib.Path(sys.argv[1]))"
    made = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120)
        made.append({path: path.stat().st_mtime_ns for path in tmp_path.iterdir()})
    assert len(made[0]) == 2 and made[0] == made[1]


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_compiler_that_fails_is_an_error_with_its_words(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "cc", "echo 'x.cc:1: error: no such thing' >&2; exit 1"))
    with pytest.raises(native.NativeError, match=r"failed: .*no such thing"):
        native.load(16, 3, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_a_folder_that_others_can_write_to_is_refused(tmp_path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(native.NativeError, match="chmod 700"):
        native.load(16, 5, tmp_path)


def test_nothing_is_kept_where_there_is_no_folder(kernels) -> None:
    assert native.load(16, 1, None).attends(jnp.dtype(jnp.bfloat16))


def test_a_machine_without_a_compiler_is_told_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(native.NativeError, match=r"install g\+\+ or clang"):
        native.load(16, 2, tmp_path)
