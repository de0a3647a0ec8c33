"""The small layers against numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.layers.linear import Linear, Vocabulary, qkv_linear, split_qkv
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import RMSNorm

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(5, 12)).astype(np.float32)
F32 = {"rngs": nnx.Rngs(0), "dtype": jnp.float32}


def test_norm_has_unit_mean_square():
    norm = RMSNorm(12, 1e-6)
    norm.g[...] = jnp.arange(12, dtype=jnp.float32)
    want = X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-6) * np.arange(12)
    np.testing.assert_allclose(norm(X), want, rtol=1e-5)


def test_norm_works_in_float32_whatever_comes_in():
    norm = RMSNorm(12, 1e-6)
    x = jnp.full((1, 12), 300.0, jnp.bfloat16)
    assert norm.g[...].dtype == jnp.float32
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(np.float32), 1.0)


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool):
    layer = Linear(12, (2, 3), (None, "mlp", "embed"), bias=bias, **F32)
    if bias:
        layer.b[...] = jnp.asarray(DRAW.normal(size=(2, 3)), jnp.float32)
    want = np.einsum("td,abd->tab", X, layer.w[...]) + (layer.b[...] if bias else 0)
    np.testing.assert_allclose(layer(X), want, rtol=1e-4, atol=1e-5)


def test_query_heads_keep_their_order():
    """Each output is its own number, so that one can see where it goes."""
    heads, kv_heads, size = 6, 2, 4
    y = np.zeros((1, kv_heads, (heads // kv_heads + 2) * size), np.float32)
    group = heads // kv_heads
    for k in range(kv_heads):
        parts = [100 + k * group + g for g in range(group)] + [200 + k, 300 + k]
        y[0, k] = np.repeat(parts, size)
    q, k, v = split_qkv(jnp.asarray(y), size)
    assert q[0, :, 0].tolist() == [100, 101, 102, 103, 104, 105]
    assert (k[0, :, 0].tolist(), v[0, :, 0].tolist()) == ([200, 201], [300, 301])
    assert qkv_linear(12, heads, kv_heads, size, **F32)(X).shape == (5, *y.shape[1:])


def test_mlp():
    mlp = GatedMLP(12, 20, **F32)
    gate, up = (X @ mlp.gate_up.w[...][i].T for i in range(2))
    want = (gate / (1 + np.exp(-gate)) * up) @ mlp.down.w[...].T
    np.testing.assert_allclose(mlp(X), want, rtol=1e-4, atol=1e-5)


def test_padding_of_the_vocabulary_is_never_likely():
    table = Vocabulary(10, 16, 12, **F32)
    scores = table.scores(X)
    assert scores.shape == (5, 16)
    assert np.isneginf(scores[:, 10:]).all()
    np.testing.assert_allclose(scores[:, :10], X @ table.w[...][:10].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(table.embed(jnp.array([3])), table.w[...][3:4])
