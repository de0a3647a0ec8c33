"""Attention without a cache, and training through it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers import dense
from tests.models.toys import TOYS, VOCAB

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("window", [None, 1, 3, 100, jnp.int32(3)])
def test_attention_is_the_textbook_sum(window):
    tokens, heads, kv_heads, size = 7, 4, 2, 8
    q, k, v = (DRAW.normal(size=(tokens, n, size)).astype(np.float32) for n in (heads, kv_heads, kv_heads))
    got = dense.attend(q, k, v, window=window, scale=0.4)
    for t in range(tokens):
        first = 0 if window is None else max(0, t - int(window) + 1)
        for n in range(heads):
            past = slice(first, t + 1)
            weights = np.exp(0.4 * k[past, n // 2] @ q[t, n])
            np.testing.assert_allclose(got[t, n], weights @ v[past, n // 2] / weights.sum(), rtol=1e-5, atol=1e-5)


def test_later_tokens_change_nothing():
    toy, _ = TOYS["alternating"]()
    ids = DRAW.integers(0, VOCAB, (1, 12)).astype(np.int32)
    apply = jax.jit(dense.apply)
    whole, part = apply(toy, ids), apply(toy, ids[:, :7])
    np.testing.assert_allclose(whole[:, :7], part, atol=1e-5)


@pytest.mark.parametrize("name", ["alternating", "scanned_windows"])
def test_gradients_are_slopes(name: str):
    """Uphill, against the difference of the loss at two points; a gradient that is wrong anywhere climbs less."""
    toy, _ = TOYS[name]()
    ids = DRAW.integers(0, VOCAB, (2, 10)).astype(np.int32)
    weights, rebuild = floats(toy)

    @jax.jit
    def loss(weights):
        chance = jax.nn.log_softmax(dense.apply(rebuild(weights), ids[:, :-1]))
        return -jnp.take_along_axis(chance, ids[:, 1:, None], -1).mean()

    slopes = jax.jit(jax.grad(loss))(weights)
    steepness = float(jnp.sqrt(sum((slope**2).sum() for slope in slopes)))
    way = [slope / steepness for slope in slopes]
    ahead, behind = (float(loss([w + e * d for w, d in zip(weights, way, strict=True)])) for e in (1e-3, -1e-3))
    assert (ahead - behind) / 2e-3 == pytest.approx(steepness, rel=0.02)


def floats(toy):
    """The toy's weights, and how to put others in their place."""
    leaves, tree = jax.tree.flatten(toy)
    at = [i for i, leaf in enumerate(leaves) if leaf.dtype == jnp.float32]
    rest = {i: leaf for i, leaf in enumerate(leaves) if i not in at}

    def rebuild(weights):
        every = dict(zip(at, weights, strict=True)) | rest
        return jax.tree.unflatten(tree, [every[i] for i in range(len(leaves))])

    return [leaves[i] for i in at], rebuild
