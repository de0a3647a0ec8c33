"""The engine under every parser: text that arrives in pieces, read once from left to right by a generator.

A reader is written as if the whole text were there and says `yield` where it has to wait for more of it, so one piece
of code is both the streaming and the whole parser. It holds back only what may still turn out to be a marker, looks
at each character a bounded number of times, and never recurses on its input. Knows no format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from itertools import groupby

from server.parsers.events import Arguments, CallEnd, CallStart, Content, Event, Reasoning

type Steps[T] = Generator[None, None, T]
"""Work that waits for more text at each `yield` and has a result at its end."""
type Sink = Callable[[str], None]
"""Where text goes."""
type Reader = Callable[[Tape, Found], Steps[None]]

SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")


class Tape:
    """The part of the text that was not read yet."""

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._at = 0
        self._closed = False

    def add(self, text: str) -> None:
        """More text has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def close(self) -> None:
        """No more text comes: nothing waits from now on."""
        self._closed = True

    @property
    def held(self) -> int:
        """How many characters have arrived and were not read."""
        return len(self._text) - self._at

    def take(self, count: int) -> str:
        """Read `count` characters that were seen."""
        start, self._at = self._at, self._at + count
        return self._text[start : self._at]

    def peek(self, count: int = 1) -> Steps[str]:
        """The next characters, unread: `count` of them, fewer only where the text ends."""
        while self.held < count and not self._closed:
            yield
        return self._text[self._at : self._at + count]

    def see(self, *words: str) -> Steps[str]:
        """The first of `words` that the text goes on with, unread; "" for none."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, words))]
            for word in words:
                if rest.startswith(word):
                    return word
                if not self._closed and word.startswith(rest):
                    break
            else:
                return ""
            yield

    def accept(self, *words: str) -> Steps[str]:
        """Like `see`, and reads it."""
        return self.take(len((yield from self.see(*words))))

    def run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Read as long as `pattern`, a repeated set of characters, goes on."""
        while True:
            match = pattern.match(self._text, self._at)
            if match and match[0]:
                sink(self.take(len(match[0])))
            if self.held or self._closed:
                return
            yield

    def space(self, sink: Sink) -> Steps[None]:
        """Read whitespace."""
        yield from self.run(_SPACES, sink)

    def until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Read up to the first marker and over it. Which one it was; "" where the text ended first."""
        while True:
            match = markers.pattern.search(self._text, self._at)
            if match:
                sink(self.take(match.start() - self._at))
                return self.take(len(match[0]))
            tail = self._text[max(self._at, len(self._text) - markers.longest) :]
            free = self.held if self._closed else self.held - markers.begun(tail)
            if free:
                sink(self.take(free))
            if self._closed:
                return ""
            yield


class Markers:
    """Some texts to look for."""

    def __init__(self, *words: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")
        self.longest = max(map(len, words), default=1)
        self._beginnings = frozenset(word[:count] for word in words for count in range(1, len(word)))

    def begun(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of a marker."""
        return next((count for count in range(len(text), 0, -1) if text[-count:] in self._beginnings), 0)


class Found:
    """Collects events. Owns the numbers of the calls and the rule about whitespace: what touches a call is no content.

    Whitespace is held until it is known what follows: text (then it belongs to it), or a call or the answer after the
    reasoning (then it is dropped). Whitespace at the very beginning or end that touches no call is kept.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._calls = 0
        self._spaces: list[str] = []
        self._kind: type[Content] | type[Reasoning] = Content
        self._fresh = False
        self._apart = ""
        self._said: type[Content] | type[Reasoning] | None = None

    def content(self, text: str) -> None:
        """Text for the user."""
        self._prose(Content, text)

    def reasoning(self, text: str) -> None:
        """Thought text."""
        self._prose(Reasoning, text)

    def turn(self, apart: str = "") -> None:
        """A marker was here: whitespace on both of its sides is nobody's text. `apart`: between texts of one kind."""
        self._spaces.clear()
        self._fresh = True
        self._apart = apart

    def start(self, name: str, id: str | None = None) -> None:
        """A call begins."""
        self.turn()
        self._said = None
        self._events.append(CallStart(self._calls, name, id))
        self._calls += 1

    def arguments(self, text: str) -> None:
        """More of the arguments of the call that began last."""
        if text:
            self._events.append(Arguments(self._calls - 1, text))

    def end(self) -> None:
        """The call that began last is complete."""
        self._events.append(CallEnd(self._calls - 1))

    def close(self) -> None:
        """The text has ended."""
        self._flush()

    def take(self) -> list[Event]:
        """The events since the last time, neighbours of a kind joined."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        return [_joined(list(group)) for _, group in groupby(events, key=_sort)]

    def _prose(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        if self._fresh:
            text = text.lstrip(SPACE)
            if not text:
                return
            self._fresh = False
            if self._apart and self._said is kind:
                self._events.append(kind(self._apart))
        body = text.rstrip(SPACE)
        if body:
            self._flush()
            self._events.append(kind(body))
            self._said = kind
        if len(body) < len(text):
            self._spaces.append(text[len(body) :])

    def _flush(self) -> None:
        if self._spaces:
            self._events.append(self._kind("".join(self._spaces)))
            self._spaces.clear()


class TextMachine:
    """A reader as a machine. What it leaves unread is content."""

    def __init__(self, reader: Reader) -> None:
        self._tape = Tape()
        self._found = Found()
        self._steps = _whole(reader, self._tape, self._found)

    @property
    def held(self) -> int:
        """How many characters wait to be understood; for tests of the work done."""
        return self._tape.held

    def feed(self, text: str) -> list[Event]:
        """What is certain after this text."""
        self._tape.add(text)
        next(self._steps, None)
        return self._found.take()

    def end(self) -> list[Event]:
        """The text has ended: what was held back."""
        self._tape.close()
        next(self._steps, None)
        self._found.close()
        return self._found.take()


class Chain:
    """Two machines: what is content to the first is the text of the second."""

    def __init__(self, first: TextMachine, second: TextMachine) -> None:
        self._first = first
        self._second = second

    def feed(self, text: str) -> list[Event]:
        """What is certain after this text."""
        return self._through(self._first.feed(text))

    def end(self) -> list[Event]:
        """The text has ended: what was held back."""
        return self._through(self._first.end()) + self._second.end()

    def _through(self, events: list[Event]) -> list[Event]:
        through: list[Event] = []
        for event in events:
            through += self._second.feed(event.text) if isinstance(event, Content) else [event]
        return through


def nowhere(text: str) -> None:
    """The sink of text that means nothing, such as whitespace inside a call."""


def done[T](steps: Steps[T]) -> T:
    """The result of work on a closed tape, which waits for nothing."""
    try:
        next(steps)
    except StopIteration as finished:
        return finished.value
    raise AssertionError("a closed tape waits for nothing")


def _whole(reader: Reader, tape: Tape, found: Found) -> Steps[None]:
    yield from reader(tape, found)
    yield from tape.until(Markers(), found.content)


def _sort(event: Event) -> tuple[type[Event], int]:
    return type(event), -1 if isinstance(event, Content | Reasoning) else event.index


def _joined(group: list[Event]) -> Event:
    first = group[0]
    if len(group) == 1 or isinstance(first, CallStart | CallEnd):
        return first
    text = "".join(event.text for event in group if not isinstance(event, CallStart | CallEnd))
    return Arguments(first.index, text) if isinstance(first, Arguments) else type(first)(text)
