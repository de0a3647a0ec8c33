"""The contract between the two halves: a `StepPlan` goes down to the device, a `StepResult` comes back.

The host decides counts; the device derives token ids, positions and cache slots from its rows. Frozen, plain
Python and numpy; this file must never import jax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from jaxserve.types import SamplingParams

SCRATCH_PAGE = 0
"""What padding of a page table points to; no sequence ever holds it."""


class Chunk(Struct, frozen=True):
    """`count` tokens of one sequence, to be computed in one step.

    The result belongs to the sequence (`sequence`, `epoch`), never to the row: by the time it is read the row may
    have a new owner, or the sequence may have been preempted.
    """

    sequence: int
    epoch: int
    row: int
    start: int
    """Position of the first token."""
    count: int
    emit: bool
    """The chunk reaches the last known token, so that a new one is sampled."""
    ids: Sequence[int] = ()
    """The tokens, where the host knows them first; empty: the device's table holds them."""
    targets: Sequence[int] = ()
    """Prompt tokens whose log probability is wanted: the ones that follow the chunk's first len(targets) tokens."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A row gets a new owner. `cached` tokens are found computed, in `pages` (one list per cache group)."""

    sequence: int
    row: int
    prompt_len: int
    cached: Sequence[int]
    pages: tuple[tuple[int, ...], ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    """Tokens that end the sequence, masked while fewer than `min_tokens` were generated."""
    banned: tuple[tuple[int, ...], ...]
    """`bad_words` as token sequences."""
    seed: int
    """64 bits, unsigned."""


class PageEntry(Struct, frozen=True):
    """Page `page` of cache group `group` becomes entry `index` of the row's table."""

    group: int
    row: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Chunks that emit come first."""

    number: int
    chunks: tuple[Chunk, ...]
    admissions: tuple[Admission, ...]
    pages: tuple[PageEntry, ...]
    tokens: int
    """Sum of the chunks' counts."""
    emitting: int
    """How many chunks emit."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is known only when a step is already at work: what its emitting chunks may say."""

    masks: np.ndarray
    """i32[emitting, W]: token v is bit v % 32 of word v // 32."""
    settled: frozenset[int]
    """Places of chunks whose token is known or not wanted any more: nothing is sampled for them."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities of some tokens, and the most likely tokens beside each."""

    logprob: np.ndarray
    """f32[n]"""
    rank: np.ndarray
    """i32[n], 1 = the most likely"""
    top_ids: np.ndarray
    """i32[n, k]"""
    top_logprobs: np.ndarray
    """f32[n, k]"""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step sampled: one token per emitting chunk, in the plan's order."""

    tokens: np.ndarray
    """i32[emitting]"""
    scores: Scores | None
    """Of the sampled tokens; None where no chunk of the step asked."""
    prompt_scores: dict[int, Scores]
    """Of the chunks with `targets`, by their place in the plan."""
