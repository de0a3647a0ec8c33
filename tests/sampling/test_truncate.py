"""Truncation by threshold against truncation by sorting."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.sampling import lanes
from jaxserve.sampling.truncate import top_k, top_p, truncate
from tests.sampling import rows
from tests.sampling.reference import Ask, truncated

SIZE = 100


def unspread(x: jax.Array, size: int) -> np.ndarray:
    groups = x.shape[1]
    return np.asarray(x).reshape(len(x), groups, -1)[:, :, : size // groups].reshape(len(x), size)


@jax.jit
def run(weights, params):
    return truncate(lanes.spread(weights, 0), params)


def cut(weights: np.ndarray, asks: list[Ask]) -> np.ndarray:
    return unspread(run(jnp.asarray(weights), rows.params(asks)), weights.shape[1])


def weights_of(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max(-1, keepdims=True)).astype(np.float32)


asks = st.builds(
    Ask,
    top_k=st.one_of(st.just(0), st.integers(1, SIZE + 3)),
    top_p=st.one_of(st.just(1.0), st.floats(2**-20, 1, exclude_max=True, width=32)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
)
logits = st.lists(st.floats(-60, 60, width=32), min_size=SIZE, max_size=SIZE)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(logits, asks), min_size=4, max_size=4))
def test_keeps_what_sorting_keeps(pairs):
    """Where the sum is within rounding of p, float32 and float64 may differ by a token of the threshold's size."""
    weights = np.stack([weights_of(np.array(x, np.float32)) for x, _ in pairs])
    got = cut(weights, [a for _, a in pairs])
    for w, kept, (_, ask) in zip(weights, got, pairs, strict=True):
        np.testing.assert_array_equal(kept[kept > 0], w[kept > 0])
        nearby = [ask, *(Ask(top_k=ask.top_k, min_p=ask.min_p, top_p=ask.top_p * f) for f in (1 - 1e-6, 1 + 1e-6))]
        sets = [(truncated(w.astype(np.float64), a) > 0) & (w > 1e-37) for a in nearby]
        assert any(np.array_equal(kept > 1e-37, s) for s in sets)


@pytest.mark.parametrize("bits", [1, 2, 3, 5])
def test_bits_settled_in_a_pass_change_nothing(bits):
    weights = jnp.asarray(weights_of(np.random.default_rng(0).normal(0, 3, (8, 1000)).astype(np.float32)))
    x = lanes.spread(weights, 0)
    k, p = jnp.arange(1, 9) * 30, jnp.linspace(0.05, 0.99, 8)
    np.testing.assert_array_equal(jax.jit(partial(top_k, bits=bits))(x, k), top_k(x, k))
    np.testing.assert_array_equal(jax.jit(partial(top_p, bits=bits))(x, p), top_p(x, p))


def test_top_k_is_the_kth_largest():
    weights = weights_of(np.random.default_rng(0).normal(0, 3, (6, 3001)).astype(np.float32))
    ks = [1, 2, 50, 1000, 3001, 4000]
    got = top_k(lanes.spread(jnp.asarray(weights), 0), jnp.asarray(ks))
    expected = [np.sort(row)[::-1][min(k, 3001) - 1] if k <= 3001 else 0 for row, k in zip(weights, ks, strict=True)]
    np.testing.assert_array_equal(got, np.float32(expected))


def test_equals_at_the_threshold_are_all_kept():
    weights = np.array([[1, 0.5, 0.5, 0.5, 0.25]], np.float32).repeat(2, 0)
    got = cut(weights, [Ask(top_k=2), Ask(top_p=0.5)])
    assert (got > 0).tolist() == [[True, True, True, True, False]] * 2


@pytest.mark.parametrize("ask", [Ask(top_k=1), Ask(top_p=1e-6), Ask(top_p=1e-45), Ask(min_p=1.0)], ids=str)
def test_only_the_largest_is_left(ask):
    weights = weights_of(np.random.default_rng(3).normal(0, 3, (4, 3001)).astype(np.float32))
    got = cut(weights, [ask] * 4)
    np.testing.assert_array_equal((got > 0).sum(1), 1)
    np.testing.assert_array_equal(got.argmax(1), weights.argmax(1))


def test_rows_that_ask_for_nothing_keep_their_bits():
    weights = weights_of(np.random.default_rng(3).normal(0, 9, (3, 3001)).astype(np.float32))
    got = cut(weights, [Ask(), Ask(top_k=5, top_p=0.5, min_p=0.1), Ask(temperature=0, top_k=5, top_p=0.1, min_p=1)])
    np.testing.assert_array_equal(got[0], weights[0])
    np.testing.assert_array_equal(got[2], weights[2])
    assert 1 <= (got[1] > 0).sum() <= 5


def test_a_row_of_zeros_stays_one():
    got = cut(np.zeros((1, 40), np.float32), [Ask(top_k=5, top_p=0.5, min_p=0.5)])
    assert not got.any()


def test_top_p_counts_after_top_k():
    """0.4 of the whole is 0.57 of what top_k leaves, so one token is enough for 0.5."""
    weights = np.array([[0.4, 0.3, 0.15, 0.15]], np.float32) / np.float32(0.4)
    assert (cut(weights, [Ask(top_k=2, top_p=0.5)]) > 0).tolist() == [[True, False, False, False]]
    assert (cut(weights, [Ask(top_p=0.5)]) > 0).tolist() == [[True, True, False, False]]
