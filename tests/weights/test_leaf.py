"""How weights multiply, and that another leaf type can take an array's place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.weights import leaf


class Doubling:
    """A leaf type that is no array."""

    def project(self, x):
        return x * 2

    def embed(self, ids):
        return ids * 2

    def unembed(self, x):
        return x.astype(jnp.float32) * 2


@pytest.fixture
def rngs():
    return nnx.Rngs(0)


def test_project_contracts_the_last_dimension(rngs):
    w = leaf.param(rngs, (2, 3, 5), (None, "mlp", "embed"), jnp.float32)
    x = jax.random.normal(jax.random.key(1), (4, 5))
    np.testing.assert_allclose(leaf.project(x, w), np.einsum("td,abd->tab", x, w.get_value()), rtol=1e-5, atol=1e-6)


def test_project_keeps_the_dtype_of_the_activations(rngs):
    w = leaf.param(rngs, (3, 5), ("mlp", "embed"), jnp.bfloat16)
    assert leaf.project(jnp.ones((2, 5), jnp.bfloat16), w).dtype == jnp.bfloat16


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_unembed_is_float32_for_any_number_of_rows(rngs, rows):
    w = leaf.param(rngs, (7, 5), ("vocab", "embed"), jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (rows, 5), jnp.bfloat16)
    logits = jax.jit(leaf.unembed)(x, w.get_value())
    assert logits.dtype == jnp.float32
    assert logits.shape == (rows, 7)
    want = np.asarray(x, np.float32) @ np.asarray(w.get_value(), np.float32).T
    np.testing.assert_allclose(logits, want, rtol=1e-5, atol=1e-5)


def test_embed_takes_rows_and_clips(rngs):
    w = leaf.param(rngs, (7, 5), ("vocab", "embed"), jnp.float32)
    got = leaf.embed(jnp.array([0, 3, 99]), w)
    np.testing.assert_array_equal(got, w.get_value()[np.array([0, 3, 6])])


@pytest.mark.parametrize("wrap", [lambda x: x, nnx.Param], ids=["bare", "param"])
def test_another_leaf_type_takes_over(wrap):
    x, w = jnp.ones((2, 3)), wrap(Doubling())
    assert leaf.project(x, w).sum() == 12
    assert leaf.unembed(x, w).sum() == 12
    assert leaf.embed(jnp.array([4]), w)[0] == 8


def test_new_weights_are_scaled_by_their_inputs(rngs):
    w = leaf.param(rngs, (300, 400), ("mlp", "embed"), jnp.float32).get_value()
    assert abs(float(w.std()) - 400**-0.5) < 1e-3


def test_gains_are_ones_and_biases_zeros():
    assert leaf.gain(3, jnp.float32).get_value().tolist() == [1, 1, 1]
    assert leaf.bias((2, 2), ("kv_heads", None), jnp.float32).get_value().sum() == 0


def test_axes_must_name_every_dimension(rngs):
    with pytest.raises(ValueError, match="must name the 2 dimensions"):
        leaf.param(rngs, (5, 3), ("embed",), jnp.float32)
