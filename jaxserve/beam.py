"""Beam search as a client of the ordinary engine: which texts to ask about next, and what their answers mean.

A round asks one greedy token of every live beam, with the log probabilities of the likeliest ones. A beam's score is
its log probability / length**length_penalty; the length is the answer's, without the token that ended it. Pure: knows
no engine, no tokenizer, no clock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.types import (
    BeamSearchParams,
    FinishReason,
    InvalidRequest,
    Logprob,
    OutputKind,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Beam:
    """One answer on its way, or at its end."""

    tokens: tuple[int, ...] = ()
    """Of the answer; the token that ended it, if one did, is the last."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of each token: itself first, then the likeliest ones."""
    cum_logprob: float = 0.0
    ended: bool = False

    @property
    def finish_reason(self) -> FinishReason:
        return "stop" if self.ended else "length"

    def score(self, length_penalty: float) -> float:
        return _normalised(self.cum_logprob, len(self.tokens) - self.ended, length_penalty)


class _Step(NamedTuple):
    """A live beam and a token that may come next."""

    before: Beam
    found: TokenLogprobs
    token: int

    def total(self) -> float:
        return self.before.cum_logprob + self.found[self.token].logprob

    def beam(self, *, ended: bool) -> Beam:
        own = {self.token: self.found[self.token], **self.found}
        return Beam((*self.before.tokens, self.token), (*self.before.logprobs, own), self.total(), ended)


class BeamSearch:
    """The search for one prompt. Ask `texts()`, give their answers to `advance`, until there are no more texts."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, eos: Collection[int], room: int) -> None:
        """`room`: how many tokens an answer may have in this context."""
        self.params = params
        self.prompt = tuple(prompt)
        self._ends = frozenset() if params.ignore_eos else frozenset(eos)
        self._most = min(params.max_tokens, room)
        self._live = [Beam()]
        self._ended: list[Beam] = []
        """The best `beam_width` of those that ended."""

    def texts(self) -> list[tuple[int, ...]]:
        """The prompt with each beam that goes on. Empty: the search is over."""
        return [self.prompt + beam.tokens for beam in self._live] if self._goes_on() else []

    def advance(self, answers: Sequence[TokenLogprobs]) -> None:
        """Takes the next token's log probabilities of each text, in the order of `texts()`."""
        width = self.params.beam_width
        steps = [
            _Step(beam, found, token)
            for beam, found in zip(self._live, answers, strict=True)
            for token in _likeliest(found, 2 * width)
        ]
        ends = [step for step in steps if step.token in self._ends]
        goes_on = [step for step in steps if step.token not in self._ends]
        ended = [step.beam(ended=True) for step in heapq.nlargest(width, ends, key=_Step.total)]
        self._ended = self._best([*self._ended, *ended])
        self._live = [step.beam(ended=False) for step in heapq.nlargest(width, goes_on, key=_Step.total)]

    def beams(self) -> list[Beam]:
        """The best `beam_width` answers, best first. A search that could stop early has as many that ended."""
        return self._best([*self._ended, *self._live])

    def _best(self, beams: list[Beam]) -> list[Beam]:
        penalty = self.params.length_penalty
        return heapq.nlargest(self.params.beam_width, beams, key=lambda beam: beam.score(penalty))

    def _goes_on(self) -> bool:
        """Some live beam may still get among the best."""
        if not self._live or len(self._live[0].tokens) >= self._most:
            return False
        if len(self._ended) < self.params.beam_width:
            return True
        return self._best_possible() > self._ended[-1].score(self.params.length_penalty)

    def _best_possible(self) -> float:
        """What the best live beam would score if all tokens from now on were certain."""
        penalty = self.params.length_penalty
        now = len(self._live[0].tokens)
        return max(_normalised(self._live[0].cum_logprob, length, penalty) for length in (now, self._most))


def ask(params: BeamSearchParams, logprobs: int = 0) -> SamplingParams:
    """One token of a live beam, with as many log probabilities as the search needs, or more if more shall be shown."""
    most = -1 if logprobs == -1 else max(2 * params.beam_width, logprobs)
    return SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=most,
        detokenize=False,
        output_kind=OutputKind.FINAL_ONLY,
    )


def next_logprobs(answer: RequestOutput) -> TokenLogprobs:
    """Of the one token of the answer to an `ask`."""
    logprobs = answer.outputs[0].logprobs
    assert logprobs, "a beam's next token was not computed"
    return logprobs[0]


def check_width(params: BeamSearchParams, max_logprobs: int, name: str = "beam_width") -> None:
    """Whether the engine computes as many log probabilities as the search needs.

    Raises:
        InvalidRequest: it does not; `name` is what the caller calls the width.
    """
    if max_logprobs >= 0 and 2 * params.beam_width > max_logprobs:
        raise InvalidRequest(
            f"{name} must be at most {max_logprobs // 2} for beam search, half of --max-logprobs {max_logprobs}, "
            f"got {params.beam_width}",
            name,
        )


def _likeliest(found: TokenLogprobs, count: int) -> list[int]:
    def logprob(item: tuple[int, Logprob]) -> float:
        return item[1].logprob

    best = heapq.nlargest(count, found.items(), key=logprob)
    return [token for token, scored in best if scored.logprob > -math.inf]


def _normalised(logprob: float, length: int, penalty: float) -> float:
    return logprob / max(length, 1) ** penalty


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """An answer of `LLM.beam_search`. Names are vLLM's."""

    tokens: list[int]
    """The prompt and the answer; the end-of-text token only with `include_stop_str_in_output`."""
    text: str
    """What `tokens` are as text, special tokens by their names."""
    cum_logprob: float
    logprobs: list[TokenLogprobs]
    """Of the answer's tokens."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]
