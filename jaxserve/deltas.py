"""Deltas of one request put together: each is taken in once, the whole is built when it is asked for.

Costs what the deltas hold, however many they are. Knows the records only; must never know where deltas come from.
"""

from __future__ import annotations

from msgspec.structs import replace

from jaxserve.types import CompletionOutput, RequestOutput, TokenLogprobs


class Deltas:
    """What a request has said. The latest delta decides what is not added up: its end, its times."""

    def __init__(self, *given: RequestOutput) -> None:
        self._latest: RequestOutput | None = None
        self._choices: dict[int, _Choice] = {}
        self._scores: tuple[TokenLogprobs | None, ...] | None = None
        for one in given:
            self.add(one)

    def add(self, new: RequestOutput) -> None:
        self._latest = new
        if new.prompt_logprobs is not None:
            self._scores = new.prompt_logprobs
        for piece in new.outputs:
            choice = self._choices.get(piece.index)
            if choice is None:
                self._choices[piece.index] = _Choice(piece)
            else:
                choice.add(piece)

    def whole(self) -> RequestOutput:
        """All of it as one output; at least one delta was added."""
        assert self._latest is not None
        choices = tuple(self._choices[i].whole() for i in sorted(self._choices))
        return replace(self._latest, outputs=choices, prompt_logprobs=self._scores)


class _Choice:
    def __init__(self, first: CompletionOutput) -> None:
        self._latest = first
        self._text = [first.text]
        self._tokens = list(first.token_ids)
        self._logprobs = None if first.logprobs is None else list(first.logprobs)

    def add(self, new: CompletionOutput) -> None:
        self._latest = new
        if new.text:
            self._text.append(new.text)
        self._tokens += new.token_ids
        if new.logprobs is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += new.logprobs

    def whole(self) -> CompletionOutput:
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        return replace(self._latest, text="".join(self._text), token_ids=tuple(self._tokens), logprobs=logprobs)
