"""Masks, bad words, bias and penalties against the reference, each alone and all in one batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.edits import LOWEST, bits, clean, edited
from tests.sampling import reference, rows
from tests.sampling.reference import Ask

SIZE = 97
TEXT = {"prompt": (3, 4, 5, 5), "output": (7, 8, 7, 9, 7)}

ASKS = {
    "nothing": Ask(),
    "presence": Ask(presence=0.7, **TEXT),
    "frequency": Ask(frequency=-1.3, **TEXT),
    "repetition": Ask(repetition=1.4, **TEXT),
    "repetition below 1": Ask(repetition=0.6, **TEXT),
    "all penalties": Ask(presence=-2, frequency=0.5, repetition=2, **TEXT),
    "bias": Ask(bias={0: 5.0, 50: -100.0, 96: 0.25}),
    "allow": Ask(allow=(1, 31, 32, 63, 64, 96)),
    "stops before min_tokens": Ask(min_tokens=6, stops=(0, 33, 96), **TEXT),
    "stops at min_tokens": Ask(min_tokens=5, stops=(0, 33, 96), **TEXT),
    "bad word": Ask(bad=((42,),)),
    "bad words that match": Ask(bad=((9, 7, 60), (7, 61), (7, 9, 7, 62)), **TEXT),
    "bad words that don't": Ask(bad=((9, 60), (8, 7, 61), (7, 7, 9, 62)), **TEXT),
    "bad word longer than the output": Ask(bad=((1, 1, 60),), output=(1,)),
    "everything": Ask(
        presence=0.1, frequency=0.2, repetition=1.1, bias={7: 3, 5: -2}, allow=(5, 7, *range(0, 97, 2)),
        stops=(8,), min_tokens=9, bad=((10,), (7, 12)), **TEXT,
    ),
}  # fmt: skip


@partial(jax.jit, static_argnums=4)
def compiled(logits, params, text, limits, vocab):
    return edited(clean(logits, vocab), params, text, limits, rows.ALL, vocab)


def run(logits: np.ndarray, asks: list[Ask], vocab: int) -> np.ndarray:
    size = logits.shape[1]
    given = rows.params(asks), rows.text(asks, size), rows.limits(asks, vocab)
    return np.asarray(compiled(jnp.asarray(logits), *given, vocab))


def close(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.where(got <= LOWEST, -np.inf, got), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ASKS)
def test_alone(name):
    logits = np.random.default_rng(0).normal(0, 3, (1, SIZE)).astype(np.float32)
    close(run(logits, [ASKS[name]], SIZE)[0], reference.edited(logits[0], ASKS[name]))


def test_all_in_one_batch_behind_a_padded_vocabulary():
    asks = list(ASKS.values())
    logits = np.random.default_rng(1).normal(0, 3, (len(asks), 104)).astype(np.float32)
    got = run(logits, asks, SIZE)
    assert np.all(got[:, SIZE:] == -np.inf)
    for row, ask in enumerate(asks):
        close(got[row, :SIZE], reference.edited(logits[row, :SIZE], ask))


def test_what_is_not_allowed_is_never_and_the_rest_a_last_resort():
    ask = Ask(allow=(1, 2, 3), bad=((1,),), min_tokens=1, stops=(2,), bias={0: 100, 1: 100, 2: 100})
    got = run(np.ones((1, 5), np.float32), [ask], 5)[0]
    assert got.tolist() == [-np.inf, float(LOWEST), float(LOWEST), 1.0, -np.inf]


def test_clean_leaves_no_nan_and_no_infinity_in_the_vocabulary():
    x = jnp.asarray([[np.nan, np.inf, -np.inf, 1e4, -1e4, np.nan]], jnp.float32)
    got = np.asarray(clean(x, 5))[0]
    assert np.all(np.isfinite(got[:5]))
    assert got[1] > got[3] > got[4] > got[2] == got[0]
    assert got[5] == -np.inf


def test_extreme_logits_stay_finite_through_penalties():
    x = np.array([[3e38, -3e38, 1e4, -1e4, -np.inf, np.nan]], np.float32)
    for repetition in (0.01, 100):
        ask = Ask(repetition=repetition, frequency=2, presence=2, output=(0, 1, 2, 3, 4, 5))
        assert np.all(np.isfinite(run(x, [ask], 6)))


@pytest.mark.parametrize("size", [31, 32, 33, 64, 70])
def test_bits(size):
    tokens = [v for v in range(min(size, 64)) if v % 3 == 0]
    got = np.asarray(bits(rows.mask([tokens], 64 if size > 32 else 32)[:, :2], size))[0]
    assert np.flatnonzero(got).tolist() == [v for v in tokens if v < 64]
