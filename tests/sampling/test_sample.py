"""The whole sampler: the order of its steps, greedy rows, odd rows, and that rows don't know of each other."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.sampling.params import Wants
from jaxserve.sampling.sample import full
from tests.sampling import reference, rows
from tests.sampling.reference import Ask

SIZE = 60
TEXT = {"prompt": (3, 4, 5, 5), "output": (7, 8, 7, 9, 7)}
NONE = Wants(*[jnp.bool_(False)] * 5)

MIXED = {
    "greedy": Ask(temperature=0, top_k=3, top_p=0.1, min_p=0.9),
    "plain": Ask(),
    "cold": Ask(temperature=0.3),
    "hot": Ask(temperature=2.0),
    "frozen": Ask(temperature=1e-5),
    "top_k": Ask(top_k=4),
    "top_p": Ask(top_p=0.6, temperature=1.5),
    "min_p": Ask(min_p=0.2, temperature=1.7),
    "all three": Ask(min_p=0.02, top_k=12, top_p=0.8, temperature=1.8),
    "penalties": Ask(presence=0.5, frequency=0.3, repetition=1.3, **TEXT),
    "greedy with penalties": Ask(temperature=0, presence=2, repetition=3, prompt=(1, 2), output=tuple(range(30))),
    "forced by bias": Ask(bias={44: 100.0}),
    "banned by bias": Ask(bias=dict.fromkeys(range(6), -100.0), top_k=2),
    "allowed": Ask(allow=(10, 20, 31, 32, 59), temperature=2.0),
    "stops": Ask(stops=tuple(range(0, 60, 2)), min_tokens=8, **TEXT),
    "bad words": Ask(bad=((9, 7, 1), (7, 2), (3,)), **TEXT),
}


def logits_of(count: int, size: int = SIZE, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (count, size)).astype(np.float32)


def test_every_parameter_in_one_batch_draws_from_the_right_distribution():
    """250 draws a call and row, eight calls, so 2,000 tokens for each kind of row."""
    kinds, logits = list(MIXED.values()), logits_of(len(MIXED))
    counts = np.zeros((len(kinds), SIZE), int)
    for call in range(8):
        asks = [dataclasses.replace(a, seed=call, position=i) for i in range(250) for a in kinds]
        tokens = rows.sample(np.tile(logits, (250, 1)), asks).token.reshape(250, len(kinds))
        for kind in range(len(kinds)):
            counts[kind] += np.bincount(tokens[:, kind], minlength=SIZE)
    for name, x, seen in zip(MIXED, logits, counts, strict=True):
        expected = reference.probabilities(x, MIXED[name])
        assert seen[expected == 0].sum() == 0, name
        assert rows.chi_square_fits(seen, expected), name


def test_plain_draws_what_full_draws():
    asks = [Ask(temperature=t, seed=9, position=i) for i, t in enumerate([0, 0.2, 0.7, 1, 1.5, 2] * 10)]
    logits = logits_of(60, 3001)
    tokens = rows.sample(logits, asks, NONE).token
    np.testing.assert_array_equal(rows.sample_plain(logits, asks), tokens)
    np.testing.assert_array_equal(tokens[::6], logits[::6].argmax(1))


@pytest.mark.parametrize("size", [3001, pytest.param(49152, marks=pytest.mark.slow)])
def test_a_row_is_the_same_alone_and_in_any_batch(size):
    """Bit for bit, whatever the number of rows and whatever the others ask for."""
    asks = [dataclasses.replace(a, seed=77, position=i) for i, a in enumerate(MIXED.values())]
    logits = logits_of(len(asks), size, 3)
    alone = [rows.sample(logits[i : i + 1], [ask], least=1) for i, ask in enumerate(asks)]
    for count in (4, 16, 64):
        who = (np.arange(count) * 5 + count) % len(asks)
        batch = rows.sample(logits[who], [asks[i] for i in who], least=count)
        for place, i in enumerate(who):
            for got, expected in zip(jax.tree.leaves(batch), jax.tree.leaves(alone[i]), strict=True):
                np.testing.assert_array_equal(got[place], expected[0], err_msg=f"{asks[i]} in {count}")


@pytest.mark.parametrize("size", [3001, 49152])
def test_plain_rows_are_the_same_alone_and_in_any_batch(size):
    asks = [Ask(temperature=0.2 * (i % 8), seed=i, position=i) for i in range(64)]
    logits = logits_of(64, size)
    whole = rows.sample_plain(logits, asks)
    for count in (1, 4, 16):
        np.testing.assert_array_equal(rows.sample_plain(logits[:count], asks[:count], least=count), whole[:count])


def test_wants_only_saves_work():
    """What no row asks for gives the same whether it is skipped or not."""
    asks = [dataclasses.replace(MIXED["plain"], position=i) for i in range(16)]
    logits = logits_of(16)
    np.testing.assert_array_equal(rows.sample(logits, asks, NONE).token, rows.sample(logits, asks, rows.ALL).token)


def test_without_logprobs_the_scores_are_zero():
    out = rows.sample(logits_of(2), [Ask()] * 2, NONE)
    assert not any(x.any() for x in (out.logprob, out.rank, out.top_ids, out.top_logprobs))
    assert out.top_ids.shape == (2, 3)


def test_logprobs_are_raw():
    """Whatever a row asks for, the probabilities are those of the untouched logits."""
    asks, logits = list(MIXED.values()), logits_of(len(MIXED))
    out = rows.sample(logits, asks)
    for row, token in enumerate(out.token):
        expected = reference.logprobs(logits[row])
        np.testing.assert_allclose(out.logprob[row], expected[token], rtol=1e-5)
        assert out.rank[row] == 1 + np.sum(logits[row] > logits[row, token])
        order = np.argsort(-logits[row], kind="stable")[:3]
        np.testing.assert_array_equal(out.top_ids[row], order)
        np.testing.assert_allclose(out.top_logprobs[row], expected[order], rtol=1e-5)


@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_the_narrowest_truncation_is_greedy(narrow):
    """Also where the two best logits are neighbours among the float32, whose weights would round to the same."""
    logits = logits_of(32, 3001) * np.float32(1e-3)
    logits[:16, 17] = np.nextafter(logits[:16].max(1), np.float32(1))
    asks = [Ask(temperature=0.5 + i % 4 / 2, position=i, **narrow) for i in range(32)]
    np.testing.assert_array_equal(rows.sample(logits, asks).token, logits.argmax(1))


def test_greedy_takes_the_lowest_of_equals():
    x = np.zeros((3, 3001), np.float32)
    x[1, [7, 1900, 2999]] = 1
    x[2, [2999]] = 1
    asks = [Ask(temperature=0)] * 3
    assert rows.sample(x, asks).token.tolist() == rows.sample_plain(x, asks).tolist() == [0, 7, 2999]


@pytest.mark.parametrize("temperature", [0, 1])
def test_padding_of_the_vocabulary_is_never_chosen(temperature):
    x = logits_of(64)
    x[:, 50:] = 1e6
    asks = [Ask(temperature=temperature, position=i) for i in range(64)]
    assert rows.sample(x, asks, vocab=50).token.max() < 50
    assert rows.sample_plain(x, asks, vocab=50).max() < 50


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_without_a_usable_logit_give_an_allowed_token(temperature):
    allowed = (5, 9, 40)
    common = {"temperature": temperature, "allow": allowed, "top_p": 0.9, "top_k": 2}
    x = logits_of(5)
    x[0] = np.nan
    x[1] = -np.inf
    x[2, list(allowed)] = np.nan
    x[4] = np.inf
    asks = [Ask(**common)] * 3 + [Ask(bad=((5,), (9,), (40,)), **common), Ask(**common)]
    tokens = rows.sample(x, asks).token
    assert set(tokens.tolist()) <= set(allowed)
    if temperature == 0:
        assert tokens.tolist() == [5] * 5


@pytest.mark.parametrize("temperature", [0, 1])
def test_rows_that_allow_nothing_still_give_a_token(temperature):
    x = np.concatenate([logits_of(1), np.full((2, SIZE), np.nan, np.float32)])
    asks = [Ask(temperature=temperature, allow=(), top_p=0.5, top_k=3)] * 3
    out = rows.sample(x, asks, vocab=50)
    assert np.all((out.token >= 0) & (out.token < 50))
    assert np.all(np.isfinite(out.logprob))
    nan = rows.sample_plain(x, asks, vocab=50)
    assert np.all((nan >= 0) & (nan < 50))


@pytest.mark.parametrize("temperature", [0, 0.01, 1, 2])
def test_extreme_logits(temperature):
    x = np.full((2, SIZE), -1e4, np.float32)
    x[:, 7] = 1e4
    x[1, 8] = -np.inf
    asks = [Ask(temperature=temperature, top_p=0.99, top_k=40, min_p=0.001)] * 2
    assert rows.sample(x, asks).token.tolist() == rows.sample_plain(x, asks).tolist() == [7, 7]


def test_bfloat16_logits_are_taken_as_float32():
    x = jnp.asarray(logits_of(4), jnp.bfloat16)
    asks = [Ask(position=i) for i in range(4)]
    wide = rows.sample(np.asarray(x.astype(jnp.float32)), asks).token
    np.testing.assert_array_equal(rows.sample(x, asks).token, wide)


def test_arrays_without_width_are_allowed():
    """No bias, no bad words, one-token bad words only: widths of 0."""
    asks, x = [Ask()] * 2, jnp.asarray(logits_of(2))
    text = dataclasses.replace(rows.text(asks, SIZE), recent=jnp.zeros((2, 0), jnp.int32))
    none = {"bias_ids": jnp.zeros((2, 0), jnp.int32), "bias": jnp.zeros((2, 0))}
    limits = dataclasses.replace(rows.limits(asks, SIZE), **none, bad=jnp.full((2, 1, 1), 3, jnp.int32))
    go = jax.jit(partial(full, vocab=SIZE, top=0))
    out = go(x, rows.params(asks), text, limits, rows.ALL)
    assert out.top_ids.shape == out.top_logprobs.shape == (2, 0)
    limits = dataclasses.replace(limits, bad=jnp.zeros((2, 0, 1), jnp.int32))
    assert go(x, rows.params(asks), text, limits, rows.ALL).token.shape == (2,)


def test_a_mask_too_short_for_the_vocabulary_is_refused():
    asks = [Ask()]
    limits = dataclasses.replace(rows.limits(asks, SIZE), stops=jnp.zeros((1, 1), jnp.uint32))
    with pytest.raises(ValueError, match="masks must have 2 words"):
        full(jnp.zeros((1, SIZE)), rows.params(asks), rows.text(asks, SIZE), limits, rows.ALL, vocab=SIZE, top=0)
