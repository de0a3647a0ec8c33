"""A device that can be computed by hand, and that checks what the real one could not survive.

The token after a text is a function of the text. The pool is a table of what was written where, so that a step that
would read another sequence's keys fails at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.plan import SCRATCH_PAGE, Choice, Chunk, Scores, StepPlan, StepResult
from jaxserve.types import SamplingParams

VOCAB = 64


def next_token(text: Sequence[int]) -> int:
    """What follows `text`."""
    return (31 * len(text) + 7 * sum(text) + text[-1]) % VOCAB


def next_allowed(text: Sequence[int], mask: np.ndarray) -> int:
    """The first token from `next_token` on that the mask has."""
    first = next_token(text)
    return next(t for i in range(VOCAB) if int(mask[(t := (first + i) % VOCAB) // 32]) >> t % 32 & 1)


def continuation(prompt: Sequence[int], count: int, stops: frozenset[int] = frozenset()) -> list[int]:
    """What a sequence alone would answer."""
    text = list(prompt)
    while len(text) < len(prompt) + count:
        text.append(next_token(text))
        if text[-1] in stops:
            break
    return text[len(prompt) :]


TOP = 5


def rank_of(token: int, text: Sequence[int]) -> int:
    """How likely `token` is after `text`: 1 is the most likely, and the token that is sampled has rank 3."""
    return (token - next_token(text) + 2) % VOCAB + 1


def logprob_of(rank: int) -> float:
    return -rank / 4


def likeliest(text: Sequence[int], count: int) -> list[int]:
    return [(next_token(text) - 2 + i) % VOCAB for i in range(count)]


def scores(texts: Sequence[Sequence[int]], tokens: Sequence[int]) -> Scores:
    """Of each token after its text."""
    ranks = np.array([rank_of(token, text) for text, token in zip(texts, tokens, strict=True)], np.int32)
    top = np.array([likeliest(text, TOP) for text in texts], np.int32).reshape(-1, TOP)
    values = np.tile(logprob_of(np.arange(1, TOP + 1)), (len(texts), 1)).astype(np.float32)
    return Scores(logprob_of(ranks).astype(np.float32), ranks, top, values)


@dataclass
class Row:
    params: SamplingParams
    tokens: list[int]
    computed: int
    pages: list[list[int]]


class FakeFlight:
    """A step that is sampled when it is told to, with the state that rows have then."""

    def __init__(self, device: FakeExecutor, emitting: list[Row], prompt_scores: dict[int, Scores]) -> None:
        self._device, self._emitting, self._prompt_scores = device, emitting, prompt_scores
        self._result: StepResult | None = None

    def sample(self, choice: Choice | None = None) -> None:
        assert self._device.unsampled is self and self._result is None
        self._device.unsampled = None
        rows = self._emitting
        settled = frozenset() if choice is None else choice.settled
        allowed = [None if choice is None else choice.masks[at].view(np.uint32) for at in range(len(rows))]
        texts = [list(row.tokens) for row in rows]
        tokens = [0 if at in settled else self._device.sample(row, allowed[at]) for at, row in enumerate(rows)]
        wanted = any(row.params.logprobs is not None for row in rows)
        self._result = StepResult(
            np.array(tokens, np.int32), scores(texts, tokens) if wanted else None, self._prompt_scores
        )

    def read(self) -> StepResult:
        assert self._result is not None
        return self._result


class FakeExecutor:
    """Runs a plan at once; `depth` is the engine's affair."""

    def __init__(
        self, page: int, windows: Sequence[int | None] = (None,), *, budget: int = 10**9, rows: int = 10**9
    ) -> None:
        self.page, self.windows, self.budget, self.max_rows = page, windows, budget, rows
        self.rows: dict[int, Row] = {}
        self.pools: list[dict[tuple[int, int], tuple[int, ...]]] = [{} for _ in windows]
        self.steps: list[StepPlan] = []
        self.unsampled: FakeFlight | None = None

    def launch(self, plan: StepPlan) -> FakeFlight:
        assert self.unsampled is None, "a step is launched before the one ahead of it is sampled"
        self.steps.append(plan)
        assert 0 < plan.tokens == sum(c.count for c in plan.chunks) <= self.budget
        assert len(plan.chunks) <= self.max_rows
        assert len({c.row for c in plan.chunks}) == len(plan.chunks)
        assert [c.emit for c in plan.chunks] == sorted((c.emit for c in plan.chunks), reverse=True)
        for a in plan.admissions:
            self.rows[a.row] = Row(a.params, list(a.cached), len(a.cached), [list(pages) for pages in a.pages])
        written: list[set[int]] = [set() for _ in self.windows]
        for e in plan.pages:
            table = self.rows[e.row].pages[e.group]
            assert e.index == len(table) and e.page != SCRATCH_PAGE
            table.append(e.page)
            assert e.page not in written[e.group], "a page is given to two sequences in one step"
            written[e.group].add(e.page)
        for chunk in plan.chunks:
            self._write(chunk)
        for chunk in plan.chunks:
            self._read(chunk)
        prompt_scores = {at: self._score(chunk) for at, chunk in enumerate(plan.chunks) if chunk.targets}
        emitting = [self.rows[chunk.row] for chunk in plan.chunks if chunk.emit]
        self.unsampled = FakeFlight(self, emitting, prompt_scores)
        return self.unsampled

    def _write(self, chunk: Chunk) -> None:
        row = self.rows[chunk.row]
        assert row.computed == chunk.start
        if chunk.ids:
            assert len(chunk.ids) == chunk.count and len(row.tokens) == chunk.start
            row.tokens.extend(chunk.ids)
        row.computed += chunk.count
        assert row.computed <= len(row.tokens)
        for at in range(chunk.start, row.computed):
            for group, pool in enumerate(self.pools):
                pool[row.pages[group][at // self.page], at % self.page] = tuple(row.tokens[: at + 1])

    def _read(self, chunk: Chunk) -> None:
        """Every key that the chunk looks at was written for exactly this text."""
        row = self.rows[chunk.row]
        for group, window in enumerate(self.windows):
            low = 0 if window is None else max(0, chunk.start - window + 1)
            for at in range(low, row.computed):
                slot = (row.pages[group][at // self.page], at % self.page)
                assert self.pools[group][slot] == tuple(row.tokens[: at + 1]), "reads a page of another text"

    def _score(self, chunk: Chunk) -> Scores:
        row = self.rows[chunk.row]
        return scores([row.tokens[: chunk.start + 1 + i] for i in range(len(chunk.targets))], chunk.targets)

    def sample(self, row: Row, mask: np.ndarray | None) -> int:
        assert row.computed == len(row.tokens)
        row.tokens.append(next_token(row.tokens) if mask is None else next_allowed(row.tokens, mask))
        return row.tokens[-1]

    def close(self) -> None:
        self.rows.clear()


class Letters:
    """A vocabulary whose token t is a character."""

    def __init__(self) -> None:
        self.eos_token_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [(ord(c) - ord("0")) % VOCAB for c in text]

    def token_text(self, token: int) -> str:
        return chr(ord("0") + token)

    def token_bytes(self, token: int) -> bytes:
        return self.token_text(token).encode()

    def stream(self, *, skip_special_tokens: bool, prompt: Sequence[int]) -> LetterStream:
        return LetterStream()


class LetterStream:
    def step(self, token: int) -> str | None:
        return chr(ord("0") + token)

    def flush(self) -> str:
        return ""
