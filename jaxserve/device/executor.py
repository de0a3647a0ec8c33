"""Runs plans: uploads a few small buffers a step, launches programs that are already compiled, starts the copy back.

Owns everything on the device: weights, KV pool, rows, workspace. Never waits, but for `Flight.read`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from jaxserve.device import rows as rowlib
from jaxserve.device import step
from jaxserve.device.programs import SCORED, Programs, Shapes
from jaxserve.device.step import WANTS, Sampled
from jaxserve.plan import Admission, Choice, Chunk, Scores, StepPlan, StepResult
from jaxserve.types import SamplingParams


@dataclass
class Flight:
    """A launched step: `sample` it, then `read` it."""

    executor: Executor
    chunks: Sequence[Chunk]
    """Those that emit."""
    prompt: list[tuple[int, int, Sampled]]
    """Place of the chunk in the plan, how many targets, their scores."""
    sampled: Sampled | None = None
    """Of the spare row where nothing is emitted: it says when the step is over."""
    scored: bool = False

    def sample(self, choice: Choice | None = None) -> None:
        """Launches the sampler. Later steps may be launched after that."""
        self.sampled, self.scored = self.executor.sample(self.chunks, choice)

    def read(self) -> StepResult:
        """Waits for the step, and samples it freely if nobody has."""
        if self.sampled is None:
            self.sample()
        assert self.sampled is not None
        emitting = len(self.chunks)
        tokens = np.asarray(self.sampled.tokens)[:emitting]
        scores = _scores(self.sampled, emitting) if self.scored else None
        pieces: dict[int, list[Scores]] = {}
        for at, count, piece in self.prompt:
            pieces.setdefault(at, []).append(_scores(piece, count))
        return StepResult(tokens, scores, {at: _joined(found) for at, found in pieces.items()})


class Executor:
    """The device half of an engine."""

    def __init__(self, shapes: Shapes, programs: Programs, leaves: list[jax.Array]) -> None:
        self.shapes = shapes
        self.leaves: list[jax.Array] = leaves
        self._programs = programs
        self._spare = shapes.rows.rows
        self._rows, self._kv, self._work, self._any = programs.empty()
        self._wants = np.zeros((shapes.rows.rows + 1, len(WANTS)), np.int32)
        self._full = np.zeros(shapes.rows.rows + 1, bool)

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step, up to sampling; returns before it has run."""
        self._admit(plan.admissions)
        self._forward(plan)
        prompt = self._score(plan)
        _copy_back([piece for _, _, piece in prompt])
        return Flight(self, plan.chunks[: plan.emitting], prompt)

    def sample(self, chunks: Sequence[Chunk], choice: Choice | None) -> tuple[Sampled, bool]:
        """Starts sampling for the emitting chunks of the step launched last; whether scores are in the result.

        Samples the spare row where there is no other: else a long prompt's chunks would all be launched at once.
        """
        settled = choice.settled if choice is not None else ()
        rows = [self._spare if at in settled else c.row for at, c in enumerate(chunks)] or [self._spare]
        size = next(r for r in self.shapes.buckets.rows if r >= len(rows))
        wants = self._wants[rows].max(0)
        packed = np.full(size + len(WANTS), self._spare, np.int32)
        packed[: len(rows)] = rows
        packed[size:] = wants
        full = choice is not None or bool(self._full[rows].any())
        masks = [] if not full else [self._any[size] if choice is None else self._masks(choice, size)]
        self._rows, sampled = self._programs.sample[size, full](
            self.leaves, self._rows, self._work.picked, packed, *masks
        )
        _copy_back(sampled)
        return sampled, bool(wants[WANTS.index("logprobs")])

    def rehearse(self, *, largest: bool) -> None:
        """Runs the programs on nothing, so that the first request does not pay for loading them.

        Where the work of a step follows its bucket even if nothing is in it (a CPU), the larger ones are left out.
        """
        buckets = self.shapes.buckets
        self._rows = self._programs.admit(self._rows, rowlib.pack_admissions([], self._spare))
        for tokens in buckets.tokens if largest else buckets.tokens[:1]:
            self._forward(StepPlan(0, (), (), (), tokens, 0))
        for rows in buckets.rows if largest else buckets.rows[:1]:
            for full in (False, True):
                packed = np.full(rows + len(WANTS), self._spare, np.int32)
                packed[rows:] = 0
                masks = [self._any[rows]] if full else []
                self._rows, _ = self._programs.sample[rows, full](
                    self.leaves, self._rows, self._work.picked, packed, *masks
                )
        jax.block_until_ready(self._rows)

    def close(self) -> None:
        """Frees the device memory."""
        for array in jax.tree.leaves((self._rows, self._kv, self._work, self._any, self.leaves)):
            array.delete()
        self.leaves = []

    def _admit(self, admissions: Sequence[Admission]) -> None:
        for first in range(0, len(admissions), rowlib.ADMITTED):
            some = list(admissions[first : first + rowlib.ADMITTED])
            self._rows = self._programs.admit(self._rows, rowlib.pack_admissions(some, self._spare))
        for a in admissions:
            self._wants[a.row] = _wants(a)
            self._full[a.row] = self._wants[a.row].any() or _limited(a)
            if _limited(a):
                new = rowlib.pack_limits(a, self.shapes.rows)
                self._rows = self._programs.limit(self._rows, np.int32(a.row), new)
            self._restore(a)

    def _restore(self, a: Admission) -> None:
        """Fills the table of a row whose first tokens are in the prefix cache."""
        size, page = rowlib.RESTORED, self.shapes.step.page
        for start in range(0, len(a.cached), size):
            ids = _padded(a.cached[start : start + size], size)
            pages = np.stack([_padded(g[start // page : (start + size) // page], size // page) for g in a.pages])
            packed = np.array([a.row, start, min(size, len(a.cached) - start)], np.int32)
            self._rows = self._programs.restore(self._rows, packed, ids, pages)

    def _forward(self, plan: StepPlan) -> None:
        tokens = next(t for t in self.shapes.buckets.tokens if t >= plan.tokens)
        packed = self._pack(plan, tokens)
        self._rows, self._kv, self._work = self._programs.forward[tokens](
            self.leaves, self._rows, self._kv, self._work, packed
        )

    def _pack(self, plan: StepPlan, tokens: int) -> np.ndarray:
        """The layout of `step.forward`."""
        chunks, entries = self.shapes.chunks(tokens), self.shapes.entries(tokens)
        packed = np.zeros(step.upload_size(tokens, chunks, entries), np.int32)
        packed[:tokens] = -1
        at = 0
        for chunk in plan.chunks:
            if chunk.ids:
                packed[at : at + chunk.count] = chunk.ids
            at += chunk.count
        row = packed[tokens : tokens + chunks]
        row[:] = self._spare
        row[: len(plan.chunks)] = [c.row for c in plan.chunks]
        packed[tokens + chunks : tokens + chunks + len(plan.chunks)] = [c.count for c in plan.chunks]
        table = packed[tokens + 2 * chunks :].reshape(-1, 4)
        table[:, 1] = self._spare
        if plan.pages:
            table[: len(plan.pages)] = [(e.group, e.row, e.index, e.page) for e in plan.pages]
        return packed

    def _score(self, plan: StepPlan) -> list[tuple[int, int, Sampled]]:
        found: list[tuple[int, int, Sampled]] = []
        first = 0
        for place, chunk in enumerate(plan.chunks):
            for i in range(0, len(chunk.targets), SCORED):
                targets = chunk.targets[i : i + SCORED]
                at = np.minimum(first + i + np.arange(SCORED, dtype=np.int32), first + chunk.count - 1)
                got = self._programs.score(self.leaves, self._work.hidden, at, _padded(targets, SCORED))
                found.append((place, len(targets), got))
            first += chunk.count
        return found

    def _masks(self, choice: Choice, size: int) -> np.ndarray:
        """For all rows of the bucket, and as wide as the padded vocabulary."""
        masks = np.full((size, self.shapes.rows.words), -1, np.int32)
        rows, words = choice.masks.shape
        masks[:rows, :words] = choice.masks
        return masks


def _wants(a: Admission) -> list[int]:
    """In the order of `WANTS`."""
    p: SamplingParams = a.params
    truncated = not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
    penalised = p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1
    several = any(len(words) > 1 for words in a.banned)
    return [int(w) for w in (penalised, bool(p.logit_bias), several, truncated, p.logprobs is not None)]


def _limited(a: Admission) -> bool:
    """The row's masks, biases or bad words are not the empty ones."""
    p = a.params
    return bool(p.logit_bias or a.banned or p.min_tokens or p.allowed_token_ids is not None)


def _padded(values: Sequence[int], size: int) -> np.ndarray:
    out = np.zeros(size, np.int32)
    out[: len(values)] = values
    return out


def _scores(s: Sampled, count: int) -> Scores:
    arrays = (s.logprob, s.rank, s.top_ids, s.top_logprobs)
    return Scores(*(np.asarray(a)[:count] for a in arrays))


def _joined(pieces: list[Scores]) -> Scores:
    fields = ("logprob", "rank", "top_ids", "top_logprobs")
    return Scores(*(np.concatenate([getattr(p, f) for p in pieces]) for f in fields))


def _copy_back(results: object) -> None:
    for array in jax.tree.leaves(results):
        array.copy_to_host_async()
