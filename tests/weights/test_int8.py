"""int8 leaves: what they hold, how they multiply, and that a loader and a mesh make the same of them as one device."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.config import QUANTIZATIONS
from jaxserve.models import registry
from jaxserve.weights import leaf
from jaxserve.weights.int8 import ROWS, Int8Weight
from jaxserve.weights.leaf import Axes, Encoded, Leaf
from jaxserve.weights.load import load
from jaxserve.weights.placement import places, shardings, spec
from jaxserve.weights.quantization import METHODS, quantise
from tests.models.cases import Case
from tests.models.loading import read_config
from tests.weights.test_load import LAYERS, SOURCES, Memory, Model, checkpoint, expected, mesh

__all__ = ["checkpoint"]

LAYOUTS: list[tuple[tuple[int, ...], Axes]] = [
    ((20, 48), ("embed", "mlp")),
    ((3, 8, 48), ("kv_heads", None, "embed")),
    ((2, 12, 48), (None, "mlp", "embed")),
]
BY_AXES = pytest.mark.parametrize(("shape", "axes"), LAYOUTS, ids=lambda x: "-".join(map(str, x)))


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def dequantised(w: Int8Weight) -> np.ndarray:
    """The float array that the leaf stands for, by a way of its own: the stored order undone axis by axis."""
    stored = np.asarray(w.values, np.float32) * np.asarray(w.scales)[..., None]
    names = ["stack"] * (stored.ndim - len(w.axes)) + [str(a) for a in w.axes_of_arrays()[0]]
    wanted = ["stack"] * (stored.ndim - len(w.axes)) + [str(a) for a in w.axes]
    return stored.transpose([names.index(name) for name in wanted])


def relative(got: jax.Array, want: jax.Array | np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want))


@BY_AXES
@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "stack"])
def test_every_weight_is_kept_to_half_a_step_of_its_channel(
    shape: tuple[int, ...], axes: Axes, stack: tuple[int, ...]
) -> None:
    w = random(*stack, *shape)
    made = Int8Weight.of(w, axes)
    assert made.shape == w.shape and made.values.dtype == jnp.int8 and made.scales.dtype == jnp.float32
    step = np.abs(w).max(-1, keepdims=True) / 127
    assert (np.abs(dequantised(made) - w) <= step * 0.5001).all()
    assert int(jnp.abs(made.values).max()) == 127


@BY_AXES
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_loader_encodes_as_a_device_does(shape: tuple[int, ...], axes: Axes, dtype: np.dtype) -> None:
    w = np.asarray(random(*shape)).astype(dtype)
    made = Int8Weight.of(jnp.asarray(w), axes)
    values, scales = made.encode(w)
    np.testing.assert_allclose(scales, made.scales, rtol=1e-6)
    assert np.abs(values.astype(int) - np.asarray(made.values, int)).max() <= 1
    assert (values != np.asarray(made.values)).mean() < 0.01


def test_more_channels_than_are_encoded_at_once() -> None:
    w = np.asarray(random(ROWS * 2 + 7, 4))
    made = Int8Weight.of(jnp.asarray(w), ("vocab", "embed"))
    values, scales = made.encode(w)
    assert values.shape == w.shape
    assert relative(jnp.asarray(values * scales[:, None]), w) < 0.01


@BY_AXES
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_project_is_the_exact_product_of_what_was_rounded(shape: tuple[int, ...], axes: Axes, rows: int) -> None:
    made, x = Int8Weight.of(random(*shape), axes), random(rows, shape[-1], seed=1)
    got = jax.jit(leaf.project)(x, made)
    step = np.abs(x).max(-1, keepdims=True) / 127
    rounded = np.round(x / step) * step
    want = np.tensordot(rounded, dequantised(made), (1, -1))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    assert relative(got, np.tensordot(x, random(*shape), (1, -1))) < 0.02


def test_a_product_is_of_int8_by_int8() -> None:
    made = Int8Weight.of(random(2, 12, 48), (None, "mlp", "embed"))
    text = jax.jit(leaf.project).lower(jnp.ones((8, 48), jnp.bfloat16), made).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) == 1 and "xi8>, tensor" in dots[0] and "xi8>) -> tensor<8x24xi32>" in dots[0]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_results_have_the_types_of_a_float_leaf(dtype: jnp.dtype) -> None:
    made = Int8Weight.of(random(40, 16).astype(dtype), ("vocab", "embed"))
    assert isinstance(made, Leaf) and isinstance(made, Encoded)
    assert leaf.project(jnp.ones((2, 16), dtype), Int8Weight.of(random(8, 16), ("mlp", "embed"))).dtype == dtype
    assert leaf.unembed(jnp.ones((2, 16), dtype), made).dtype == jnp.float32
    assert leaf.embed(jnp.array([1]), made).dtype == dtype


def test_a_vocabulary_has_a_scale_for_each_token() -> None:
    w = random(40, 16) * jnp.arange(1, 41)[:, None]
    made, x = Int8Weight.of(w, ("vocab", "embed")), random(3, 16, seed=1)
    assert relative(leaf.embed(jnp.array([0, 7, 99]), made), w[np.array([0, 7, 39])]) < 0.01
    got, want = leaf.unembed(x, made), x @ w.T
    assert float(jnp.abs((got - want) / jnp.arange(1, 41)).max()) < 0.15


def test_zeros_give_zeros_and_what_is_not_finite_stays_so() -> None:
    made = Int8Weight.of(random(8, 16).at[3].set(0), ("mlp", "embed"))
    assert (leaf.project(random(2, 16), made)[:, 3] == 0).all()
    x = random(4, 16).at[0].set(0).at[1, 5].set(jnp.nan).at[2, 5].set(jnp.inf)
    y = leaf.project(x, made)
    assert (y[0] == 0).all() and not jnp.isfinite(y[1:3]).any() and jnp.isfinite(y[3]).all()


def test_a_token_does_not_depend_on_its_company() -> None:
    made, x = Int8Weight.of(random(20, 48), ("embed", "mlp")), random(64, 48, seed=1) * 10.0
    together = jax.jit(leaf.project)(x, made)
    for rows in (1, 2, 8):
        np.testing.assert_array_equal(jax.jit(leaf.project)(x[:rows], made), together[:rows])


@BY_AXES
@pytest.mark.parametrize("ways", [2, 4])
def test_split_over_devices_it_is_the_same_to_the_bit(shape: tuple[int, ...], axes: Axes, ways: int) -> None:
    """A split contraction too: the scale of a token is that of its largest value on any device."""
    shape = tuple(4 * n if a in ("mlp", "kv_heads") else n for n, a in zip(shape, axes, strict=True))
    made = Int8Weight.of(random(*shape), axes)
    x = random(8, shape[-1], seed=1) * jnp.linspace(0.01, 3, shape[-1])
    want = jax.jit(leaf.project)(x, made)
    over = mesh(ways)
    places = [NamedSharding(over, spec(a, len(a))) for a in made.axes_of_arrays()]
    split = jax.tree.unflatten(
        jax.tree.structure(made), [jax.device_put(a, p) for a, p in zip(jax.tree.leaves(made), places, strict=True)]
    )
    given = jax.device_put(x, NamedSharding(over, P(None, spec(axes, len(axes))[-1])))
    program = jax.jit(leaf.project).lower(given, split).compile()
    np.testing.assert_array_equal(program(given, split), want)
    text = program.as_text()
    assert text is not None and "all-gather" not in text
    assert text.count(" all-reduce(") == (2 if axes[-1] == "mlp" else 0)


def abstract() -> Model:
    return jax.eval_shape(lambda: quantise(Model(jnp.bfloat16), "int8"))


@pytest.mark.parametrize("ways", [1, 2])
def test_load_fills_int8_leaves(checkpoint: Memory, ways: int) -> None:
    seen: list[tuple[int, int]] = []
    model = load(abstract(), SOURCES, checkpoint, mesh=mesh(ways), progress=lambda *both: seen.append(both))
    w, embed = model.layers.w.get_value(), model.embed.get_value()
    assert isinstance(w, Int8Weight) and isinstance(embed, Int8Weight)
    assert w.shape == (LAYERS, 2, 6, 4) and w.values.shape == (LAYERS, 6, 2, 4)
    for made, floats in ((w, expected(checkpoint)), (embed, checkpoint.tensors["embed"])):
        want = Int8Weight.of(jnp.asarray(floats), made.axes)
        np.testing.assert_allclose(made.scales, want.scales, rtol=1e-6)
        np.testing.assert_array_equal(made.values, want.values)
    assert model.layers.norm.get_value().dtype == jnp.float32
    assert [a.sharding for a in jax.tree.leaves(model)] == shardings(abstract(), mesh(ways))
    assert w.scales.sharding == NamedSharding(mesh(ways), P(None, "tensor", None))
    assert seen[-1] == (sum(a.nbytes for a in jax.tree.leaves(model)),) * 2


@pytest.mark.parametrize("ways", [1, 2])
def test_an_absent_leaf_is_zero(checkpoint: Memory, ways: int) -> None:
    for i in range(LAYERS):
        del checkpoint.tensors[f"layer.{i}.a"], checkpoint.tensors[f"layer.{i}.b"]
    sources = [replace(s, optional=True) for s in SOURCES]
    model = load(abstract(), sources, checkpoint, mesh=mesh(ways))
    assert not leaf.project(jnp.ones((2, 4)), jax.tree.map(lambda a: a[0], model.layers.w.get_value())).any()


@pytest.mark.parametrize("name", ["llama3", "qwen3", "qwen2"])
def test_which_leaves_of_a_model_are_int8(name: str) -> None:
    """Projections and vocabularies; not norms, not biases."""
    c = read_config(Case(name).directory)
    model = jax.eval_shape(lambda: quantise(registry.family(c.architecture).model(c, rngs=nnx.Rngs(0)), "int8"))
    found = {place.path.rsplit(".", 2)[-2] for place in places(model) if isinstance(place.leaf, Encoded)}
    assert found - {"head"} == {"embed", "qkv", "o", "gate_up", "down"}
    assert all(place.path.endswith(".w") for place in places(model) if isinstance(place.leaf, Encoded))


def test_the_table_of_methods_is_what_the_option_takes() -> None:
    assert tuple(METHODS) == QUANTIZATIONS
    model = Model()
    assert quantise(model, None) is model
