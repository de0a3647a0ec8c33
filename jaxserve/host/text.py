"""From tokens to text, one token at a time: no half characters, no beginning of a stop string ever leaves.

Knows strings only; what a token is, the tokenizer says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct


class TokenStream(Protocol):
    """The tokenizers library's incremental decoder."""

    def step(self, token: int) -> str | None:
        """The text that this token completes, or None while characters are incomplete."""
        ...

    def flush(self) -> str:
        """The text of tokens whose last character never became complete."""
        ...


class Piece(Struct, frozen=True):
    """Text that may leave, and the stop string that ends it, if one was found."""

    text: str
    stop: str | None = None


class TextStream:
    """The text of one sequence.

    Holds back what might become a stop string: the longest end of the text that is a beginning of one. A stop
    string counts if it ends in the token that reaches `min_tokens`, or in a later one.
    """

    def __init__(self, stream: TokenStream, stops: Sequence[str], *, include_stop: bool, min_tokens: int) -> None:
        self._stream = stream
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._count = 0
        self._held = ""

    def push(self, token: int) -> Piece:
        """The next token of the sequence."""
        self._count += 1
        text = self._stream.step(token) or ""
        return self._release(text) if self._stops else Piece(text)

    def skip(self) -> None:
        """The next token of the sequence, which has no text (a stop token that is not shown)."""
        self._count += 1

    def flush(self) -> Piece:
        """The sequence has ended: everything that was held back, unless a stop string is in it."""
        if not self._stops:
            return Piece(self._stream.flush())
        piece = self._release(self._stream.flush())
        if piece.stop is not None:
            return piece
        held, self._held = self._held, ""
        return Piece(piece.text + held)

    def _release(self, text: str) -> Piece:
        before = len(self._held)
        self._held += text
        if text and self._count >= self._min_tokens:
            found = [
                (at, stop) for stop in self._stops if (at := self._held.find(stop, max(0, before + 1 - len(stop)))) >= 0
            ]
            if found:
                at, stop = min(found)
                out = self._held[: at + len(stop) * self._include_stop]
                self._held = ""
                return Piece(out, stop)
        keep = max(self._overlap(stop) for stop in self._stops)
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return Piece(out)

    def _overlap(self, stop: str) -> int:
        """Length of the longest proper beginning of `stop` that the held text ends with."""
        for n in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:n]):
                return n
        return 0
