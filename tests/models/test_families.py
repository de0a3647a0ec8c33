"""What every model file must keep: sources for all leaves, axes for all dimensions, gains in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers import dense
from jaxserve.models import names, registry
from jaxserve.models.config import DecoderConfig
from jaxserve.weights.placement import RULES, slots
from tests.models.cases import CASES
from tests.models.loading import load_model, read_config

CONFIGS = {case.name: read_config(case.directory) for case in CASES}
each_config = pytest.mark.parametrize("c", CONFIGS.values(), ids=CONFIGS)


def abstract(c: DecoderConfig, dtype=jnp.bfloat16) -> nnx.Module:
    return jax.eval_shape(lambda: registry.family(c.architecture).model(c, rngs=nnx.Rngs(0), dtype=dtype))


def test_every_architecture_is_tried():
    assert {c.architecture for c in CONFIGS.values()} == set(registry.architectures())


def test_an_unknown_architecture_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM, .*Qwen3ForCausalLM"):
        registry.family("GPT2LMHeadModel")


@each_config
def test_every_leaf_has_one_source(c: DecoderConfig):
    paths = [source.path for source in registry.family(c.architecture).tensors(c)]
    assert sorted(paths) == sorted(slot.path for slot in slots(abstract(c)))


@each_config
def test_every_dimension_but_that_of_the_layers_is_named(c: DecoderConfig):
    for slot in slots(abstract(c)):
        assert len(slot.shape) - len(slot.axes) == int(".segments" in slot.path), slot
        assert set(slot.axes) <= set(RULES)


@each_config
def test_gains_are_float32_and_the_rest_as_asked(c: DecoderConfig):
    for slot in slots(abstract(c)):
        assert slot.dtype == (jnp.float32 if slot.path.endswith(".g") else jnp.bfloat16), slot


@each_config
def test_blocks_name_their_cache_group(c: DecoderConfig):
    groups = registry.family(c.architecture).cache_groups(c)
    layers = [0] * len(groups)
    for segment in abstract(c).segments:
        for block in segment.blocks:
            layers[block.group] += jax.tree.leaves(block)[0].shape[0]
            assert block.attn.window == groups[block.group].window
    assert layers == [group.layers for group in groups]


def test_repeated_heads_are_next_to_each_other():
    c = read_config(next(case for case in CASES if case.name == "qwen2").directory, ways=4)
    q = np.arange(4).repeat(c.head_dim)[:, None]
    k, v = np.arange(10, 12).repeat(c.head_dim)[:, None], np.arange(20, 22).repeat(c.head_dim)[:, None]
    fused = names.fuse_qkv(c, q, k, v)[:, :: c.head_dim, 0]
    assert fused.tolist() == [[0, 10, 20], [1, 10, 20], [2, 11, 21], [3, 11, 21]]


def test_a_loaded_model_can_be_trained():
    case = next(case for case in CASES if case.name == "qwen3")
    ids = case.recorded()[1].ids[None]

    @jax.jit
    def loss(model):
        chance = jax.nn.log_softmax(dense.apply(model, ids[:, :-1]))
        return -jnp.take_along_axis(chance, ids[:, 1:, None], -1).mean()

    step = jax.jit(lambda model: jax.tree.map(lambda w, s: w - 0.02 * s, model, jax.grad(loss)(model)))
    model = load_model(case.directory)
    before = loss(model)
    for _ in range(20):
        model = step(model)
    assert loss(model) < 0.8 * before
