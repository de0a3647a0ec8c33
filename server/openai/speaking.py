"""One choice of a chat answer: the engine's text in, what the caller is told out, whole or as deltas.

Both ways come from the same events of one machine, so that they cannot differ. Knows no HTTP.
"""

from __future__ import annotations

import re
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from msgspec import UNSET

from jaxserve.types import CompletionOutput, FinishReason
from server.openai.dialect import Dialect, shown, special_tokens
from server.openai.messages import short_id
from server.openai.protocol import (
    ChatDelta,
    ChatFinish,
    ChatMessage,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from server.openai.tools import ToolUse
from server.parsers.engine import Markers
from server.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Machine, Reasoning
from server.parsers.registry import ReasoningFormat, ToolFormat, machine
from server.service import Tokenizer

COUNTED = 1000
"""Characters of thoughts that are counted at a time, and then never again."""


@dataclass(frozen=True, slots=True)
class Manner:
    """How the answers to one request are understood and told."""

    dialect: Dialect
    use: ToolUse
    opened: bool
    """Answers begin inside the model's thoughts."""
    finds_calls: bool
    with_reasoning: bool
    hides_specials: bool
    """The caller wants no special tokens in texts."""
    tells_stop: bool
    """The token that ends an answer stands in its text."""
    role: str
    said: str
    """What the choice begins with: the text of the message that it continues, where `echo` asks for it."""

    @property
    def calls(self) -> ToolFormat | None:
        return self.dialect.tools if self.finds_calls else None

    @property
    def enforces(self) -> bool:
        """Calls are held to a grammar."""
        return self.finds_calls and self.use.needs_grammar

    @property
    def formats(self) -> Sequence[ToolFormat | ReasoningFormat]:
        return [found for found in (self.calls, self.dialect.reasoning) if found is not None]

    def wants_specials(self, tokenizer: Tokenizer) -> bool:
        """The engine must not leave special tokens out: the machine needs some."""
        return bool(shown(self.formats, tokenizer))


class Speaker:
    """One choice on its way."""

    def __init__(self, manner: Manner, tokenizer: Tokenizer) -> None:
        self._manner = manner
        self._machine: Machine | None = None
        self._without: Without | None = None
        self._thoughts: _Thoughts | None = None
        self._complete = False
        self._open = 0
        if manner.formats:
            use, dialect = manner.use, manner.dialect
            self._machine = machine(use.callable, manner.calls, dialect.reasoning, opened=manner.opened)
            kept = shown(manner.formats, tokenizer)
            if manner.hides_specials and kept:
                known = special_tokens(tokenizer).items()
                self._without = Without({id: text for text, id in known if text not in kept})
        if manner.dialect.reasoning is not None:
            self._thoughts = _Thoughts(manner.dialect.reasoning, tokenizer, manner.opened)

    def hear(self, piece: CompletionOutput) -> list[Event]:
        """What the next piece of the engine's output says; at the end also what was held back."""
        text = piece.text
        ended = piece.finish_reason is not None
        if self._without is not None:
            text = self._without.feed(text, self._told_tokens(piece)) + (self._without.end() if ended else "")
        if self._machine is None:
            return [Content(text)] if text else []
        events = self._machine.feed(text) if text else []
        if ended:
            events += self._machine.end()
        if self._thoughts is not None:
            self._thoughts.hear(piece.token_ids, events)
        events = [event for event in events if self._is_told(event)]
        ends = sum(isinstance(event, CallEnd) for event in events)
        self._complete = self._complete or ends > 0
        self._open += sum(isinstance(event, CallStart) for event in events) - ends
        return events

    @property
    def reasoning_tokens(self) -> int:
        """Tokens so far that were thoughts."""
        return 0 if self._thoughts is None else self._thoughts.count

    def finish(self, reason: FinishReason | None) -> ChatFinish | None:
        """Why the choice ended: by calls, if it has only whole ones and was not cut; a named call is a plain stop."""
        whole = self._complete and not self._open
        called = reason == "stop" and whole and self._manner.use.mode != "named"
        return "tool_calls" if called else reason

    def deltas(self, events: Iterable[Event]) -> list[ChatDelta]:
        """What is new, one delta an event."""
        return [delta for event in events if (delta := self._delta(event)) is not None]

    def message(self, events: Sequence[Event]) -> ChatMessage:
        """The whole answer from all its events."""
        content = [event.text for event in events if isinstance(event, Content)]
        reasoning = [event.text for event in events if isinstance(event, Reasoning)]
        calls = [self._call(event, events) for event in events if isinstance(event, CallStart)]
        text = self._manner.said + "".join(content)
        return ChatMessage(
            role=self._manner.role,
            content=text if text or not calls else None,
            reasoning="".join(reasoning) if reasoning else UNSET,
            tool_calls=calls or UNSET,
        )

    def _told_tokens(self, piece: CompletionOutput) -> Sequence[int]:
        """Those whose text may be in the answer's: not the one that ended it."""
        by_token = piece.finish_reason == "stop" and not isinstance(piece.stop_reason, str)
        return piece.token_ids[:-1] if by_token and not self._manner.tells_stop else piece.token_ids

    def _is_told(self, event: Event) -> bool:
        if isinstance(event, Reasoning):
            return self._manner.with_reasoning
        if isinstance(event, Content):  # beside calls that are demanded it is only the cut beginning of another one
            return not (self._manner.finds_calls and self._manner.use.forced)
        return event.index == 0 or self._manner.use.parallel

    def _delta(self, event: Event) -> ChatDelta | None:
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(reasoning=text)
            case CallStart(index, name):
                first = FunctionDelta(name=name, arguments="")
                call = ToolCallDelta(index=index, id=self._id(event), type="function", function=first)
                return ChatDelta(tool_calls=[call])
            case Arguments(index, text):
                return ChatDelta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])
            case CallEnd():
                return None

    def _call(self, start: CallStart, events: Sequence[Event]) -> ToolCall:
        pieces = [e.text for e in events if isinstance(e, Arguments) and e.index == start.index]
        return ToolCall(id=self._id(start), function=FunctionCall(name=start.name, arguments="".join(pieces)))

    def _id(self, start: CallStart) -> str:
        """The model's own id of the call, where it gives one."""
        new = uuid.uuid4().hex
        short = self._manner.dialect.template.wants_short_ids
        return start.id or (short_id(new) if short else f"call_{new[:24]}")


class Without:
    """Text without some tokens, whose words may arrive in pieces. Where other tokens make these words, they stay."""

    def __init__(self, words: Mapping[int, str]) -> None:
        """`words` by their tokens."""
        self._words = words
        self._markers = _markers(frozenset(words.values()))
        self._due: Counter[str] = Counter()
        """Words whose tokens have come, but not they themselves."""
        self._held = ""

    def feed(self, text: str, tokens: Sequence[int]) -> str:
        """What is certain to stay of `text`, which comes with these tokens or later ones."""
        self._due.update(self._words[token] for token in tokens if token in self._words)
        text = self._held + text
        tail = self._markers.pattern.split(text)[-1]
        size = len(text) - self._markers.begun(tail[-self._markers.longest :])
        self._held = text[size:]
        return self._markers.pattern.sub(self._left, text[:size])

    def end(self) -> str:
        text, self._held = self._held, ""
        return text

    def _left(self, found: re.Match[str]) -> str:
        """What becomes of a word."""
        word = found[0]
        if not self._due[word]:
            return word
        self._due[word] -= 1
        return ""


@lru_cache(maxsize=16)
def _markers(words: frozenset[str]) -> Markers:
    return Markers(*filter(None, words))


class _Thoughts:
    """Counts the tokens of the thoughts: between their markers, where each is a token, else those of their text."""

    def __init__(self, format: ReasoningFormat, tokenizer: Tokenizer, inside: bool) -> None:
        self._tokenizer = tokenizer
        self._start = _single(format.start, tokenizer)
        self._end = _single(format.end, tokenizer)
        self._inside = inside
        self._over = False
        self._seen = 0
        self._text = ""

    def hear(self, tokens: Sequence[int], events: Sequence[Event]) -> None:
        if self._start is None or self._end is None:
            self._text += "".join(event.text for event in events if isinstance(event, Reasoning))
            while len(self._text) > COUNTED:
                self._seen += self._tokens_of(self._text[:COUNTED])
                self._text = self._text[COUNTED:]
            return
        for token in tokens:
            self._inside = not self._over and (self._inside or token == self._start)
            self._seen += self._inside
            self._over = self._over or (self._inside and token == self._end)

    @property
    def count(self) -> int:
        return self._seen + (self._tokens_of(self._text) if self._text else 0)

    def _tokens_of(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))


def _single(text: str, tokenizer: Tokenizer) -> int | None:
    ids = tokenizer.encode(text, add_special_tokens=False) if text else []
    return ids[0] if len(ids) == 1 else None
