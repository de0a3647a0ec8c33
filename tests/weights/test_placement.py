"""The rule table, and what does not divide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.weights import leaf
from jaxserve.weights.placement import shardings, slots, spec


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.qkv = leaf.param(rngs, (6, 5, 4), ("kv_heads", None, "embed"), jnp.float32)
        self.down = leaf.param(rngs, (4, 12), ("embed", "mlp"), jnp.float32)


class Model(nnx.Module):
    def __init__(self):
        self.embed = leaf.param(nnx.Rngs(0), (24, 4), ("vocab", "embed"), jnp.bfloat16)
        self.layers = jax.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
        self.table = nnx.Param(jnp.zeros((2, 2)))


@pytest.fixture(scope="module")
def model():
    return jax.eval_shape(Model)


def mesh(ways):
    return Mesh(np.array(jax.devices()[:ways]), ("tensor",))


def test_spec_follows_the_table():
    assert spec(("vocab", "embed"), 2) == P("tensor", None)
    assert spec(("embed", None, "mlp"), 3) == P(None, None, "tensor")


def test_a_stack_has_one_dimension_more():
    assert spec(("heads", "embed"), 3) == P(None, "tensor", None)


def test_unknown_axes_and_wrong_dimensions_are_refused():
    with pytest.raises(ValueError, match="'experts' is not in the rule table"):
        spec(("experts",), 1)
    with pytest.raises(ValueError, match="do not fit"):
        spec(("embed",), 3)


def test_slots_are_the_leaves_in_order(model):
    found = slots(model)
    assert [s.path for s in found] == [".embed", ".layers.down", ".layers.qkv", ".table"]
    assert [s.shape for s in found] == [leaf.shape for leaf in jax.tree.leaves(model)]
    assert found[3].axes == (None, None)


def test_shardings_one_for_each_leaf(model):
    specs = [s.spec for s in shardings(model, mesh(2))]
    want = [P("tensor", None), P(None, None, "tensor"), P(None, "tensor", None, None), P(None, None)]
    assert specs == want


def test_what_does_not_divide_says_what_would(model):
    with pytest.raises(
        ValueError, match=r"4 devices cannot share kv_heads of \.layers\.qkv, which is 6.*be 1, 2, 3, 6"
    ):
        shardings(model, mesh(4))
