"""Log probabilities, ranks and the likeliest tokens against the reference."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.logprobs import largest, score
from tests.sampling import reference


def run(logits: np.ndarray, targets: list[int], vocab: int, top: int) -> list[np.ndarray]:
    out = jax.jit(partial(score, vocab=vocab, top=top))(jnp.asarray(logits), jnp.asarray(targets, jnp.int32))
    return [np.asarray(x) for x in out]


@pytest.mark.parametrize(
    ("vocab", "size", "top"), [(97, 97, 5), (97, 104, 0), (97, 104, 97), (3001, 3008, 20), (1, 1, 1)]
)
def test_against_the_reference(vocab, size, top):
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(0, 5, (6, size)), 1).astype(np.float32)
    logits[:, vocab:] = 1e6
    targets = rng.integers(0, vocab, 6).tolist()
    logprob, rank, ids, tops = run(logits, targets, vocab, top)
    assert ids.shape == tops.shape == (6, top)
    assert ids.dtype == rank.dtype == np.int32
    for row, target in enumerate(targets):
        x = logits[row, :vocab]
        expected = reference.logprobs(x)
        np.testing.assert_allclose(logprob[row], expected[target], rtol=1e-5, atol=1e-5)
        assert rank[row] == 1 + np.sum(x > x[target])
        order = np.argsort(-x, kind="stable")[:top]
        np.testing.assert_array_equal(ids[row], order)
        np.testing.assert_allclose(tops[row], expected[order], rtol=1e-5, atol=1e-5)


def test_of_equals_the_lower_id_comes_first():
    x = jnp.zeros((2, 3000)).at[:, 100:2900:7].set(1)
    _, ids = jax.jit(partial(largest, top=50))(x)
    np.testing.assert_array_equal(ids, [np.arange(100, 2900, 7)[:50]] * 2)
    _, ids = jax.jit(partial(largest, top=500))(x)
    ones = np.arange(100, 2900, 7)
    rest = np.setdiff1d(np.arange(3000), ones)
    np.testing.assert_array_equal(ids, [np.concatenate([ones, rest])[:500]] * 2)


def test_extreme_and_unusable_logits_give_finite_numbers():
    x = np.zeros((5, 50), np.float32)
    x[0, :2] = 1e4, -1e4
    x[1, :2] = np.inf, np.nan
    x[2] = np.nan
    x[3] = -np.inf
    x[4, 1:] = -np.inf
    logprob, rank, _, tops = run(x, [0] * 5, 50, 3)
    assert np.all(np.isfinite(logprob))
    assert np.all(np.isfinite(tops))
    np.testing.assert_allclose(logprob, [0, 0, -np.log(50), -np.log(50), 0], rtol=1e-6)
    assert rank.tolist() == [1] * 5


def test_too_large_a_top_is_refused():
    with pytest.raises(ValueError, match=r"top must be in 0\.\.10"):
        run(np.zeros((1, 12), np.float32), [0], 10, 11)
