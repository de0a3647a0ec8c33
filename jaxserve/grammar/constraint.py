"""What one sequence may say next: a grammar that follows its tokens, perhaps after a time of free thinking.

One object a sequence, used by the engine's thread alone. Knows tokens and masks; no rows, no steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import llguidance
import llguidance.numpy
import numpy as np

from jaxserve.grammar.compile import Grammar

TokenMasks = np.ndarray
"""i32[S, W]: in each row, token v is bit v % 32 of word v // 32."""


@cache
def _threads() -> llguidance.LLExecutor:
    """For masks, as many as there are processors; started with the first constraint."""
    return llguidance.LLExecutor()


@dataclass(slots=True)
class Thinking:
    """Free text up to `end`. With a budget, `end` is said for the model once so many tokens were thought."""

    end: str
    end_ids: tuple[int, ...]
    bytes_of: Callable[[int], bytes]
    budget: int | None = None
    over: bool = False
    _said: int = 0
    _forced: int = 0
    """Tokens of `end_ids` that were said for the model."""
    _tail: bytes = b""

    def accept(self, token: int) -> bytes:
        """Takes a token in. Returns what it says beyond `end`, where it completes that."""
        self._forced += self._spent
        self._said += 1
        end = self.end.encode()
        text = self._tail + self.bytes_of(token)
        at = text.find(end)
        self.over = at >= 0 or self._forced == len(self.end_ids)
        self._tail = text[-len(end) :]
        return text[at + len(end) :] if at >= 0 else b""

    @property
    def next_token(self) -> int | None:
        """The one token that may follow, where thinking must end."""
        return self.end_ids[self._forced] if self._spent and not self.over else None

    @property
    def _spent(self) -> bool:
        return self.budget is not None and self._said >= self.budget


class Constraint:
    """What may follow the tokens of one sequence: `grammar`, or with none anything, after `thinking`."""

    def __init__(self, grammar: Grammar | None, thinking: Thinking | None = None) -> None:
        self._grammar = grammar
        self._matcher = None if grammar is None else grammar.matcher()
        self._thinking = thinking

    @property
    def done(self) -> bool:
        """From now on anything may follow."""
        return self._matcher is None and not self._thinks

    def accept(self, token: int) -> bool:
        """Takes the next token in. False: it must not follow, or what follows cannot be known any more."""
        if not self._thinks:
            return self._follow([token])
        assert self._thinking is not None
        rest = self._thinking.accept(token).lstrip()
        return not rest or self._grammar is None or self._follow(self._grammar.tokens_of(rest))

    def waiting(self) -> llguidance.LLMatcher | None:
        """The matcher that knows what follows, if one does."""
        return None if self._matcher is None or self._thinks or self._matcher.is_stopped() else self._matcher

    def fill(self, masks: TokenMasks, at: int) -> None:
        """Sets row `at`, which is all ones, to what may follow now."""
        matcher = self.waiting()
        if matcher is not None:
            llguidance.numpy.fill_next_token_bitmask(matcher, masks, at)
        else:
            self.fill_simple(masks, at)

    def fill_simple(self, masks: TokenMasks, at: int) -> None:
        """`fill` where no matcher is `waiting`."""
        if self._thinks:
            assert self._thinking is not None
            if self._thinking.next_token is not None:
                _only(masks, at, (self._thinking.next_token,))
        elif self._grammar is not None:
            _only(masks, at, self._grammar.eos)

    @property
    def _thinks(self) -> bool:
        return self._thinking is not None and not self._thinking.over

    def _follow(self, tokens: list[int]) -> bool:
        if self._matcher is None or self._grammar is None:
            return True
        if self._matcher.is_stopped():
            return not self._matcher.is_error() and set(tokens) <= set(self._grammar.eos)
        return self._matcher.consume_tokens(tokens)


def fill(constraints: Iterable[tuple[int, Constraint]], masks: TokenMasks) -> None:
    """Sets the row of each constraint, all of them at once."""
    matchers: list[tuple[llguidance.LLMatcher, int]] = []
    for at, constraint in constraints:
        matcher = constraint.waiting()
        if matcher is None:
            constraint.fill_simple(masks, at)
        else:
            matchers.append((matcher, at))
    if matchers:
        llguidance.numpy.fill_next_token_bitmask_par(_threads(), matchers, masks)


def certain(masks: TokenMasks, at: int) -> int | None:
    """The token of row `at`, where it has exactly one."""
    row = masks[at].view(np.uint32)
    (words,) = np.nonzero(row)
    if len(words) != 1 or int(row[words[0]]).bit_count() != 1:
        return None
    return int(words[0]) * 32 + int(row[words[0]]).bit_length() - 1


def _only(masks: TokenMasks, at: int, tokens: Iterable[int]) -> None:
    row = masks[at].view(np.uint32)
    row[:] = 0
    for token in tokens:
        row[token // 32] |= np.uint32(1 << token % 32)
