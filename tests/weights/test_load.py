"""From tensors to a placed model: the values, the dtypes, the memory they lie in, and everything that can be wrong."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.weights import leaf
from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.leaf import Source
from jaxserve.weights.load import head_is_tied, load

LAYERS = 5


@dataclass
class Memory:
    """A checkpoint in memory."""

    tensors: dict[str, np.ndarray]
    config: dict[str, object] = field(default_factory=dict)
    generation_config: dict[str, object] = field(default_factory=dict)

    def names(self):
        return self.tensors.keys()

    def shape(self, name):
        return self.tensors[name].shape

    def dtype(self, name):
        return self.tensors[name].dtype.name

    def read(self, name):
        return self.tensors[name]

    def where(self, name):
        return "memory.bin"


class Layer(nnx.Module):
    def __init__(self, rngs, dtype):
        self.w = leaf.param(rngs, (2, 6, 4), (None, "mlp", "embed"), dtype)
        self.norm = leaf.gain(4, jnp.float32)


class Model(nnx.Module):
    def __init__(self, dtype=jnp.float32):
        self.embed = leaf.param(nnx.Rngs(0), (8, 4), ("vocab", "embed"), dtype)
        self.layers = jax.vmap(lambda key: Layer(nnx.Rngs(key), dtype))(jax.random.split(jax.random.key(0), LAYERS))


def build(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.stack([a, b])


SOURCES = [
    Source(".embed", ("embed",), np.asarray),
    Source(".layers.w", ("layer.{layer}.a", "layer.{layer}.b"), build, tuple(range(LAYERS))),
    Source(".layers.norm", ("layer.{layer}.norm",), np.asarray, tuple(range(LAYERS))),
]


@pytest.fixture
def checkpoint():
    rng = np.random.default_rng(0)
    shapes = {"embed": (8, 4)}
    for i in range(LAYERS):
        shapes |= {f"layer.{i}.a": (6, 4), f"layer.{i}.b": (6, 4), f"layer.{i}.norm": (4,)}
    return Memory({name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()})


def mesh(ways: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:ways]), ("tensor",))


def abstract(dtype=jnp.float32) -> Model:
    return jax.eval_shape(lambda: Model(dtype))


def expected(checkpoint: Memory) -> np.ndarray:
    t = checkpoint.tensors
    return np.stack([build(t[f"layer.{i}.a"], t[f"layer.{i}.b"]) for i in range(LAYERS)])


def changed(source: int, **changes: object) -> list[Source]:
    return [replace(s, **changes) if i == source else s for i, s in enumerate(SOURCES)]


@pytest.mark.parametrize("ways", [1, 2])
def test_every_leaf_gets_its_values_and_its_place(checkpoint, ways):
    model = load(abstract(), SOURCES, checkpoint, mesh=mesh(ways))
    np.testing.assert_array_equal(model.embed.get_value(), checkpoint.tensors["embed"])
    np.testing.assert_array_equal(model.layers.w.get_value(), expected(checkpoint))
    assert model.layers.w.get_value().sharding.spec == P(None, None, "tensor", None)
    assert model.layers.w.get_metadata()["axes"] == (None, "mlp", "embed")
    assert {s.data.shape for s in model.embed.get_value().addressable_shards} == {(8 // ways, 4)}


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("stored", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_leaves_keep_the_dtype_of_the_model(checkpoint, ways, stored):
    checkpoint.tensors = {name: t.astype(stored) for name, t in checkpoint.tensors.items()}
    model = load(abstract(jnp.bfloat16), SOURCES, checkpoint, mesh=mesh(ways))
    assert model.embed.get_value().dtype == jnp.bfloat16
    assert model.layers.norm.get_value().dtype == jnp.float32
    want = expected(checkpoint).astype(jnp.bfloat16)
    np.testing.assert_array_equal(model.layers.w.get_value(), want)


def test_layers_may_be_any_of_the_models(checkpoint):
    order = (3, 1, 0, 2, 4)
    model = load(abstract(), changed(1, layers=order), checkpoint, mesh=mesh(1))
    np.testing.assert_array_equal(model.layers.w.get_value(), expected(checkpoint)[list(order)])


@pytest.mark.parametrize("ways", [1, 2])
def test_the_checkpoint_is_copied_never_shared(checkpoint, ways):
    aligned = np.zeros(8 * 4 * 4 + 64, np.uint8)
    start = -aligned.ctypes.data % 64
    mine = aligned[start : start + 8 * 4 * 4].view(np.float32).reshape(8, 4)
    checkpoint.tensors["embed"] = mine
    model = load(abstract(), SOURCES, checkpoint, mesh=mesh(ways))
    mine[:] = 7
    assert float(jnp.abs(model.embed.get_value()).max()) == 0


def test_one_cpu_takes_the_stack_without_a_copy(checkpoint, monkeypatch):
    seen = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, s: seen.append(x.ctypes.data) or put(x, s))
    model = load(abstract(), SOURCES, checkpoint, mesh=mesh(1))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(model)] == seen


@pytest.mark.parametrize("ways", [1, 2])
def test_progress_reaches_the_total_in_order(checkpoint, ways):
    seen = []
    model = load(abstract(), SOURCES, checkpoint, mesh=mesh(ways), progress=lambda *both: seen.append(both))
    total = sum(x.nbytes for x in jax.tree.leaves(model))
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)
    assert len(seen) == 1 + 2 * LAYERS


@pytest.mark.parametrize("ways", [1, 2])
def test_an_optional_leaf_stays_zero(checkpoint, ways):
    for i in range(LAYERS):
        del checkpoint.tensors[f"layer.{i}.norm"]
    model = load(abstract(), changed(2, optional=True), checkpoint, mesh=mesh(ways))
    assert not model.layers.norm.get_value().any()


def test_half_of_an_optional_leaf_is_an_error(checkpoint):
    del checkpoint.tensors["layer.3.norm"]
    with pytest.raises(LoadError, match=r"no tensor layer\.3\.norm"):
        load(abstract(), changed(2, optional=True), checkpoint, mesh=mesh(1))


def test_missing_tensors_are_named(checkpoint):
    for i in range(LAYERS):
        del checkpoint.tensors[f"layer.{i}.a"]
    with pytest.raises(LoadError, match=r"memory\.bin: no tensor layer\.0\.a, layer\.1\.a, layer\.2\.a and 2 more"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(1))


def test_tensors_nobody_reads_are_named(checkpoint):
    checkpoint.tensors["layer.0.scale"] = np.ones(1, np.float32)
    with pytest.raises(LoadError, match=r"memory\.bin: the model has no use for tensor layer\.0\.scale"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(1))


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"])
def test_harmless_tensors_are_passed_over(checkpoint, name):
    checkpoint.tensors[name] = np.ones(1, np.float32)
    load(abstract(), SOURCES, checkpoint, mesh=mesh(1))


@pytest.mark.parametrize("ways", [1, 2])
@pytest.mark.parametrize("shape", [(6, 5), (7, 4), (24,)])
def test_wrong_shapes_name_tensor_and_leaf(checkpoint, ways, shape):
    checkpoint.tensors["layer.2.b"] = np.zeros(shape, np.float32)
    with pytest.raises(LoadError, match=r"memory\.bin: layer\.2\.a \(6, 4\), layer\.2\.b .* cannot become \.layers\.w"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(ways))


def test_a_build_of_the_wrong_shape_is_caught(checkpoint):
    checkpoint.tensors["embed"] = np.zeros((8, 5), np.float32)
    with pytest.raises(LoadError, match=r"embed \(8, 5\) cannot become \.embed of shape \(8, 4\) \(made \(8, 5\)\)"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(1))


@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
def test_quantised_tensors_are_not_taken_for_numbers(checkpoint, dtype):
    checkpoint.tensors["embed"] = np.zeros((8, 4), dtype)
    with pytest.raises(LoadError, match=r"memory\.bin: tensor embed is .*quantised"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(1))


@pytest.mark.parametrize("sources", [SOURCES[1:], [*SOURCES, Source(".x", ("x",), np.asarray)], [*SOURCES, SOURCES[0]]])
def test_sources_and_leaves_match_one_to_one(checkpoint, sources):
    with pytest.raises(ValueError, match="every leaf needs exactly one source"):
        load(abstract(), sources, checkpoint, mesh=mesh(1))


def test_a_mesh_that_does_not_divide_the_model(checkpoint):
    with pytest.raises(ValueError, match=r"tensor_parallel_size may be 1, 2"):
        load(abstract(), SOURCES, checkpoint, mesh=mesh(4))


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.mark.parametrize(
    ("flag", "head", "tied", "logged"),
    [
        (True, None, True, ""),
        (True, lambda w: w.copy(), True, ""),
        (True, lambda w: w + 1, False, "using the file's head"),
        (True, lambda w: w.astype(np.float16), False, "using the file's head"),
        (False, None, True, "has no lm_head.weight though"),
        (False, lambda w: w.copy(), False, ""),
        (None, None, True, ""),
        (None, lambda w: w.copy(), False, ""),
    ],
)
def test_what_the_file_holds_decides_about_the_head(
    caplog, flag: bool | None, head: Callable[[np.ndarray], np.ndarray] | None, tied: bool, logged: str
):
    caplog.set_level(logging.INFO, "jaxserve")
    config = {} if flag is None else {"tie_word_embeddings": flag}
    tensors = {EMBEDDING: WEIGHT} | ({} if head is None else {HEAD: head(WEIGHT)})
    assert head_is_tied(config, Memory(tensors)) is tied
    assert logged in caplog.text
    assert bool(caplog.text) == bool(logged)
