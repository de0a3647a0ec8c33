"""The truth about each row, on the device: its tokens, its length, its pages, how it samples.

The host keeps an upper bound of the same; what a step needs beyond counts is derived from here. Padding points to
one spare row behind the last.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from jaxserve.plan import Admission
from jaxserve.sampling.params import RowLimits, RowParams
from jaxserve.types import MAX_LOGIT_BIAS

ADMITTED = 8
"""Rows that one `admit` call takes."""
RESTORED = 1024
"""Cached tokens that one `restore` call takes; a multiple of every page size."""
MOST = 2**31 - 1
BANNED, BANNED_TOKENS = 256, 16
"""Token sequences that `bad_words` may become, and tokens in each."""

_INTS = ("row", "prompt_len", "top_k", "min_tokens", "seed_low", "seed_high")
_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """R rows; donated through every program, so they change in place."""

    tokens: Int[Array, "R L"]
    computed: Int[Array, " R"]
    """Tokens whose KV exists; when a token is sampled, it is the index of that token."""
    prompt_len: Int[Array, " R"]
    pages: tuple[Int[Array, "R P"], ...]
    """One table per cache group."""
    counts: UInt[Array, "R V"]
    """How often each token was generated, for the penalties."""
    in_prompt: Bool[Array, "R V"]
    params: RowParams
    limits: RowLimits


@dataclass(frozen=True)
class RowShape:
    """Sizes of `Rows`; `rows` without the spare one."""

    rows: int
    length: int
    table: int
    vocab: int
    groups: int

    @property
    def words(self) -> int:
        """32-bit words of a mask over the vocabulary."""
        return -(-self.vocab // 32)


def empty(shape: RowShape) -> Rows:
    """Rows that nobody owns."""
    r = shape.rows + 1
    zeros = lambda dtype=jnp.int32: jnp.zeros((r,), dtype)  # noqa: E731
    return Rows(
        tokens=jnp.zeros((r, shape.length), jnp.int32),
        computed=zeros(),
        prompt_len=zeros(),
        pages=tuple(jnp.zeros((r, shape.table), jnp.int32) for _ in range(shape.groups)),
        counts=jnp.zeros((r, shape.vocab), jnp.uint16),
        in_prompt=jnp.zeros((r, shape.vocab), bool),
        params=RowParams(
            temperature=zeros(jnp.float32),
            top_k=zeros(),
            top_p=jnp.ones((r,), jnp.float32),
            min_p=zeros(jnp.float32),
            presence=zeros(jnp.float32),
            frequency=zeros(jnp.float32),
            repetition=jnp.ones((r,), jnp.float32),
            seed=jnp.zeros((r, 2), jnp.uint32),
            min_tokens=zeros(),
        ),
        limits=RowLimits(
            allow=jnp.full((r, shape.words), 0xFFFFFFFF, jnp.uint32),
            stops=jnp.zeros((r, shape.words), jnp.uint32),
            bias_ids=jnp.full((r, MAX_LOGIT_BIAS), -1, jnp.int32),
            bias=jnp.zeros((r, MAX_LOGIT_BIAS), jnp.float32),
            bad=jnp.full((r, BANNED, BANNED_TOKENS), -1, jnp.int32),
        ),
    )


def admit(rows: Rows, packed: Int[Array, "A F"]) -> Rows:
    """New owners for up to A rows: lengths, sampling parameters, and nothing left of the owner before."""
    ints = {name: packed[:, i] for i, name in enumerate(_INTS)}
    floats = {
        name: jax.lax.bitcast_convert_type(packed[:, len(_INTS) + i], jnp.float32) for i, name in enumerate(_FLOATS)
    }
    at = ints["row"]
    seed = jax.lax.bitcast_convert_type(jnp.stack([ints["seed_low"], ints["seed_high"]], 1), jnp.uint32)
    new = RowParams(top_k=ints["top_k"], min_tokens=ints["min_tokens"], seed=seed, **floats)
    put = lambda old, value: old.at[at].set(value)  # noqa: E731
    limits = rows.limits
    return dataclasses.replace(
        rows,
        computed=put(rows.computed, 0),
        prompt_len=put(rows.prompt_len, ints["prompt_len"]),
        counts=put(rows.counts, 0),
        in_prompt=put(rows.in_prompt, False),
        params=jax.tree.map(put, rows.params, new),
        limits=RowLimits(
            allow=put(limits.allow, jnp.uint32(0xFFFFFFFF)),
            stops=put(limits.stops, jnp.uint32(0)),
            bias_ids=put(limits.bias_ids, -1),
            bias=put(limits.bias, 0.0),
            bad=put(limits.bad, -1),
        ),
    )


def pack_admissions(admissions: list[Admission], spare: int) -> np.ndarray:
    """i32[A, F] for `admit`; unused entries point to the spare row."""
    packed = np.zeros((ADMITTED, len(_INTS) + len(_FLOATS)), np.int32)
    packed[:, 0] = spare
    for i, a in enumerate(admissions):
        p = a.params
        packed[i, : len(_INTS)] = (
            np.array(
                [
                    a.row,
                    a.prompt_len,
                    min(p.top_k, MOST),
                    min(p.min_tokens, MOST),
                    a.seed & 0xFFFFFFFF,
                    a.seed >> 32,
                ],
                np.uint64,
            )
            .astype(np.uint32)
            .view(np.int32)
        )
        packed[i, len(_INTS) :] = np.array(
            [
                p.temperature,
                1.0 if p.greedy else p.top_p,
                0.0 if p.greedy else p.min_p,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
            ],
            np.float32,
        ).view(np.int32)
    return packed


def limit(rows: Rows, row: Int[Array, ""], new: RowLimits) -> Rows:
    """Masks, biases and bad words of one row; `new` has no leading R."""
    return dataclasses.replace(rows, limits=jax.tree.map(lambda old, value: old.at[row].set(value), rows.limits, new))


def pack_limits(a: Admission, shape: RowShape) -> RowLimits:
    """Numpy leaves for `limit`. Bad words of a single token are part of the allow mask."""
    p = a.params
    allow = np.ones(shape.words * 32, bool)
    if p.allowed_token_ids is not None:
        allow[:] = False
        allow[list(p.allowed_token_ids)] = True
    allow[[words[0] for words in a.banned if len(words) == 1]] = False
    stops = np.zeros(shape.words * 32, bool)
    stops[list(a.stop_ids)] = True
    bias_ids = np.full(MAX_LOGIT_BIAS, -1, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token, value) in enumerate((p.logit_bias or {}).items()):
        bias_ids[i], bias[i] = token, min(100.0, max(-100.0, value))
    bad = np.full((BANNED, BANNED_TOKENS), -1, np.int32)
    for i, words in enumerate(w for w in a.banned if len(w) > 1):
        bad[i, BANNED_TOKENS - len(words) :] = words
    pack = lambda mask: np.packbits(mask, bitorder="little").view(np.uint32)  # noqa: E731
    leaves = (pack(allow), pack(stops), bias_ids, bias, bad)
    return RowLimits(*leaves)  # type: ignore[arg-type] - numpy, which the call uploads


def restore(rows: Rows, packed: Int[Array, " 3"], ids: Int[Array, " C"], pages: Int[Array, "groups Cp"]) -> Rows:
    """Tokens that were found computed: `packed` is row, start (a multiple of C), count; `pages` hold their KV."""
    row, start, count = packed[0], packed[1], packed[2]
    length, table = rows.tokens.shape[1], rows.pages[0].shape[1]
    i = jnp.arange(ids.shape[0])
    at = jnp.where(i < count, start + i, length)
    size = ids.shape[0] // pages.shape[1]
    j = jnp.arange(pages.shape[1])
    where = jnp.where(j * size < count, start // size + j, table)
    rows = dataclasses.replace(
        rows,
        tokens=rows.tokens.at[row, at].set(ids, mode="drop"),
        computed=rows.computed.at[row].set(start + count),
        pages=tuple(t.at[row, where].set(pages[g], mode="drop") for g, t in enumerate(rows.pages)),
    )
    return note_tokens(rows, jnp.full_like(ids, row), at, ids, i < count)


def note_tokens(
    rows: Rows, row: Int[Array, " T"], position: Int[Array, " T"], ids: Int[Array, " T"], given: Bool[Array, " T"]
) -> Rows:
    """Counts tokens that the host gave, for the penalties: as prompt or, after a preemption, as generated before."""
    vocab = rows.counts.shape[1]
    prompt = position < rows.prompt_len[row]
    asked = jnp.where(given & prompt, ids, vocab)
    said = jnp.where(given & ~prompt, ids, vocab)
    return dataclasses.replace(
        rows,
        in_prompt=rows.in_prompt.at[row, asked].set(True, mode="drop"),
        counts=rows.counts.at[row, said].add(jnp.uint16(1), mode="drop"),
    )
