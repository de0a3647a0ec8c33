"""Requests as their callers see them: committed tokens become text, log probabilities and `RequestOutput`s.

Owns what was said so far of each request; knows no row, page or step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxserve.host.sequence import Sequence
from jaxserve.host.text import Piece, TextStream, TokenStream
from jaxserve.plan import Scores
from jaxserve.types import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    RequestStats,
    RequestTimes,
    TokenLogprobs,
)


class Vocabulary(Protocol):
    """What is asked of a tokenizer here."""

    def stream(self, *, skip_special_tokens: bool, prompt: Seq[int]) -> TokenStream: ...

    def token_text(self, token: int) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(slots=True)
class Choice:
    """One sequence of a request, and what of it has not left yet."""

    sequence: Sequence
    stream: TextStream | None
    cumulative: float | None
    text: list[str] = field(default_factory=list[str])
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    last: float = 0.0
    """When its latest token came, in seconds on the monotonic clock."""
    open: bool = True


class Answer:
    """A request and its choices."""

    def __init__(self, request: Request, sequences: Seq[Sequence], vocabulary: Vocabulary) -> None:
        self.request = request
        self.first_token = 0.0
        """When it came, in seconds on the monotonic clock; 0.0: it has not."""
        self._scheduled = self._last_token = 0.0
        self._vocabulary = vocabulary
        wants = request.params.logprobs is not None
        self._choices = [Choice(s, self._stream(), 0.0 if wants else None) for s in sequences]
        scored = request.params.prompt_logprobs is not None
        self._prompt: list[TokenLogprobs | None] | None = [None for _ in request.prompt_ids] if scored else None
        self._open = len(sequences)
        self._output_tokens = 0
        self._said = False

    @property
    def sequences(self) -> list[Sequence]:
        return [choice.sequence for choice in self._choices]

    @property
    def finished(self) -> bool:
        return self._open == 0

    @property
    def times(self) -> RequestTimes:
        return RequestTimes(self.request.arrival, self._scheduled, self.first_token, self._last_token)

    def scheduled(self, now: float) -> None:
        """A sequence of it has got a row."""
        self._scheduled = self._scheduled or now

    def scored(self, start: int, targets: Seq[int], scores: Scores) -> None:
        """Log probabilities of the prompt tokens `targets`, which begin at position start + 1."""
        if self._prompt is None:
            return
        want = self.request.params.prompt_logprobs or 0
        for i, token in enumerate(targets):
            self._prompt[start + 1 + i] = self._logprobs(scores, i, token, want)

    def take(self, index: int, token: int, at: int, scores: Scores | None, now: float) -> tuple[Piece, float]:
        """The next token of choice `index`: its text, and the seconds since the token before (0.0 for the first)."""
        choice = self._choices[index]
        gap, choice.last = (now - choice.last if choice.last else 0.0), now
        self.first_token = self.first_token or now
        self._last_token = now
        self._output_tokens += 1
        choice.tokens.append(token)
        if self.request.params.logprobs is not None and scores is not None:
            found = self._logprobs(scores, at, token, self.request.params.logprobs)
            choice.logprobs.append(found)
            choice.cumulative = (choice.cumulative or 0.0) + found[token].logprob
        return self._say(choice, token), gap

    def output(self) -> RequestOutput:
        """What is new since the last call."""
        outputs = [
            self._delta(choice) for choice in self._choices if choice.tokens or choice.text or self._ending(choice)
        ]
        prompt_logprobs = tuple(self._prompt) if self._prompt is not None and not self._said else None
        self._said = True
        return RequestOutput(
            request_id=self.request.id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_ids,
            outputs=tuple(outputs),
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._choices[0].sequence.cached,
            metrics=self.times,
        )

    def stats(self, now: float, reason: FinishReason) -> RequestStats:
        return RequestStats(
            times=self.times,
            finished=now,
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self._choices[0].sequence.cached,
            output_tokens=self._output_tokens,
            finish_reason=reason,
            n=self.request.params.n,
            max_tokens=self.request.params.max_tokens,
            shaped=self.request.params.structured_outputs is not None,
        )

    def _stream(self) -> TextStream | None:
        p = self.request.params
        if not p.detokenize:
            return None
        tokens = self._vocabulary.stream(skip_special_tokens=p.skip_special_tokens, prompt=self.request.prompt_ids)
        stops = p.stop if isinstance(p.stop, tuple) else ()
        return TextStream(tokens, stops, include_stop=p.include_stop_str_in_output, min_tokens=p.min_tokens)

    def _say(self, choice: Choice, token: int) -> Piece:
        """Adds the token's text, and at the sequence's end what was held back."""
        if choice.stream is None:
            return Piece("")
        s = choice.sequence
        if s.finish_reason is None:
            piece = choice.stream.push(token)
            choice.text.append(piece.text)
            return piece
        hidden = s.finish_reason == "stop" and not self.request.params.include_stop_str_in_output
        if hidden:
            choice.stream.skip()
            piece = Piece("")
        else:
            piece = choice.stream.push(token)
        choice.text.append(piece.text)
        if piece.stop is None:
            piece = choice.stream.flush()
            choice.text.append(piece.text)
        return piece

    def _ending(self, choice: Choice) -> bool:
        return choice.open and choice.sequence.finish_reason is not None

    def _delta(self, choice: Choice) -> CompletionOutput:
        s = choice.sequence
        if s.finish_reason is not None:
            self._open -= choice.open
            choice.open = False
            if s.finish_reason in ("abort", "error") and choice.stream is not None:
                choice.text.append(choice.stream.flush().text)
        delta = CompletionOutput(
            index=s.index,
            text="".join(choice.text),
            token_ids=tuple(choice.tokens),
            cumulative_logprob=choice.cumulative,
            logprobs=tuple(choice.logprobs) if self.request.params.logprobs is not None else None,
            finish_reason=s.finish_reason,
            stop_reason=s.stop_reason,
        )
        choice.text, choice.tokens, choice.logprobs = [], [], []
        return delta

    def _logprobs(self, scores: Scores, at: int, token: int, want: int) -> TokenLogprobs:
        """The token itself first, then the `want` most likely ones (-1: all that were computed)."""
        text = self._vocabulary.token_text
        found = {token: Logprob(float(scores.logprob[at]), int(scores.rank[at]), text(token))}
        ids: np.ndarray = scores.top_ids[at]
        count = len(ids) if want < 0 else want
        for rank, (other, value) in enumerate(
            zip(ids[:count].tolist(), scores.top_logprobs[at][:count].tolist(), strict=True), start=1
        ):
            if other not in found:
                found[other] = Logprob(value, rank, text(other))
        return found
