"""Gathers `Ask`s into the arrays that the sampler takes, as a step would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.params import RowLimits, RowParams, RowText, Sampled, Wants
from jaxserve.sampling.sample import full, plain
from tests.sampling.reference import Ask

LONGEST = 4
BIASES = 6
BAD = 3
ALL = Wants(*[jnp.bool_(True)] * 5)


def params(asks: Sequence[Ask]) -> RowParams:
    def column(name: str, dtype: type) -> jax.Array:
        return jnp.asarray([getattr(a, name) for a in asks], dtype)

    reals = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
    wholes = ("top_k", "min_tokens")
    return RowParams(
        **{name: column(name, jnp.float32) for name in reals},
        **{name: column(name, jnp.int32) for name in wholes},
        seed=jnp.asarray([[a.seed >> 32, a.seed & 0xFFFFFFFF] for a in asks], jnp.uint32),
    )


def text(asks: Sequence[Ask], size: int) -> RowText:
    counts, in_prompt = np.zeros((len(asks), size), np.uint16), np.zeros((len(asks), size), bool)
    for row, ask in enumerate(asks):
        np.add.at(counts[row], list(ask.output), 1)
        in_prompt[row, list(ask.prompt)] = True
    return RowText(
        position=jnp.asarray([a.position for a in asks], jnp.int32),
        generated=jnp.asarray([len(a.output) for a in asks], jnp.int32),
        counts=jnp.asarray(counts),
        in_prompt=jnp.asarray(in_prompt),
        recent=jnp.asarray([_right(a.output[1 - LONGEST :], LONGEST - 1) for a in asks], jnp.int32),
    )


def limits(asks: Sequence[Ask], vocab: int) -> RowLimits:
    everything = range(vocab)
    bias = [_left(list(a.bias.items()), BIASES, (-1, 0.0)) for a in asks]
    return RowLimits(
        allow=mask((everything if a.allow is None else a.allow for a in asks), vocab),
        stops=mask((a.stops for a in asks), vocab),
        bias_ids=jnp.asarray([[v for v, _ in row] for row in bias], jnp.int32),
        bias=jnp.asarray([[b for _, b in row] for row in bias], jnp.float32),
        bad=jnp.asarray([[_right(w, LONGEST) for w in _left(list(a.bad), BAD, ())] for a in asks], jnp.int32),
    )


def mask(sets: Iterable[Iterable[int]], vocab: int) -> jax.Array:
    """u32[S, W] with a bit for each token."""
    rows = []
    for tokens in sets:
        bits = np.zeros(-(-vocab // 32) * 32, bool)
        bits[list(tokens)] = True
        rows.append(np.packbits(bits, bitorder="little").view("<u4"))
    return jnp.asarray(np.stack(rows))


def sample(
    logits: np.ndarray, asks: Sequence[Ask], wants: Wants = ALL, top: int = 3, vocab: int = 0, least: int = 64
) -> Sampled:
    """`full` as numpy, in a batch of at least `least` rows. The vocabulary is all columns unless it is named."""
    vocab, count = vocab or logits.shape[1], len(asks)
    asks, logits = [*asks, *[asks[-1]] * (least - count)], filled(logits, least)
    given = params(asks), text(asks, logits.shape[1]), limits(asks, vocab), wants
    return jax.tree.map(lambda x: np.asarray(x)[:count], compiled_full(vocab, top)(logits, *given))


def sample_plain(logits: np.ndarray, asks: Sequence[Ask], vocab: int = 0, least: int = 64) -> np.ndarray:
    """`plain` as numpy, likewise."""
    vocab, count = vocab or logits.shape[1], len(asks)
    asks = [*asks, *[asks[-1]] * (least - count)]
    asked, position = params(asks), jnp.asarray([a.position for a in asks], jnp.int32)
    out = compiled_plain(vocab)(filled(logits, least), asked.temperature, asked.seed, position)
    return np.asarray(out)[:count]


def filled(logits: np.ndarray, least: int) -> jax.Array:
    """The last row again until there are enough."""
    return jnp.asarray(np.concatenate([logits, logits[-1:].repeat(max(least - len(logits), 0), 0)]))


@cache
def compiled_full(vocab: int, top: int) -> Callable[..., Sampled]:
    return jax.jit(partial(full, vocab=vocab, top=top))


@cache
def compiled_plain(vocab: int) -> Callable[..., jax.Array]:
    return jax.jit(partial(plain, vocab=vocab))


def chi_square_fits(counts: np.ndarray, p: np.ndarray) -> bool:
    """Whether counts look drawn from p: chi-square below its mean plus five deviations, cells under 5 put together."""
    expected = p * counts.sum()
    small = expected < 5
    observed = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    used = expected > 0
    assert observed[~used].sum() == 0
    freedom = max(used.sum() - 1, 1)
    statistic = np.sum((observed[used] - expected[used]) ** 2 / expected[used])
    return bool(statistic < freedom + 5 * np.sqrt(2 * freedom))


def _right(tokens: Sequence[int], width: int) -> list[int]:
    return [-1] * (width - len(tokens)) + list(tokens)


def _left(entries: list, width: int, empty: object) -> list:
    return entries + [empty] * (width - len(entries))
