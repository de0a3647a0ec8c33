"""Reads calls that are JSON objects with a name and arguments, in either order, alone or in an array.

Shared by every format that writes them. The arguments go out as they come, unless the name comes after them. What
turns out to be no call is content, from its first character on; once a call has started it stays, and only the rest
is content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from server.parsers.engine import Found, Steps, Tape
from server.parsers.json_text import is_object, read_string, read_value
from server.parsers.tools import Tools

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset((*_NAMES, *_ARGUMENTS, "type", "id"))


def read_calls(tape: Tape, found: Found, tools: Tools, *, opening: str = "", bare: bool = False) -> Steps[bool]:
    """Read an object, or an array of them. `opening`: the text before it that is content if no call follows.

    `bare`: nothing but its shape says that this is a call, so that other keys, or an unknown name without arguments,
    make it content. False: some of it was no call, and what follows is whatever it is.
    """
    draft = _Draft(found, tools, bare, [opening])
    if (yield from tape.peek()) != "[":
        return (yield from _read_call(tape, draft))
    draft.keep(tape.take(1))
    while True:
        yield from tape.space(draft.keep)
        if not (yield from _read_call(tape, draft)):
            return False
        draft = _Draft(found, tools, bare, [])
        yield from tape.space(draft.keep)
        if (yield from tape.accept("]")):
            return True
        if not (yield from tape.see(",")):
            draft.spoil()
            return False
        draft.keep(tape.take(1))


@dataclass(slots=True)
class _Draft:
    """A call while it is read. Before it has started, its text is kept in case that it is none."""

    found: Found
    tools: Tools
    bare: bool
    raw: list[str]
    name: str | None = None
    id: str | None = None
    arguments: list[str] = field(default_factory=list[str])
    has_arguments: bool = False
    started: bool = False

    def keep(self, text: str) -> None:
        if not self.started:
            self.raw.append(text)

    def keep_arguments(self, text: str) -> None:
        self.keep(text)
        self.arguments.append(text)

    def start(self) -> None:
        """The name is known and this is a call."""
        if not self.started and self.name is not None:
            self.started = True
            self.raw.clear()
            self.found.start(self.name, self.id)
            for piece in self.arguments:
                self.found.arguments(piece)

    def spoil(self) -> bool:
        self.found.content("".join(self.raw))
        self.raw.clear()
        return False

    def finish(self) -> bool:
        if not self.bare or self.has_arguments or self.name in self.tools:
            self.start()
        if not self.started:
            return self.spoil()
        if not self.has_arguments:
            self.found.arguments("{}")
        self.found.end()
        return True


def _read_call(tape: Tape, draft: _Draft) -> Steps[bool]:
    if not (yield from tape.see("{")):
        return draft.spoil()
    draft.keep(tape.take(1))
    yield from tape.space(draft.keep)
    if (yield from tape.see("}")):
        return draft.spoil()
    while True:
        if not (yield from _read_member(tape, draft)):
            return draft.spoil()
        yield from tape.space(draft.keep)
        end = yield from tape.accept("}", ",")
        draft.keep(end)
        if end == "}":
            return draft.finish()
        if not end:
            return draft.spoil()
        yield from tape.space(draft.keep)


def _read_member(tape: Tape, draft: _Draft) -> Steps[bool]:
    key = yield from _read_text(tape, draft)
    if key is None or (draft.bare and key not in _KEYS and not draft.started):
        return False
    yield from tape.space(draft.keep)
    if not (yield from tape.see(":")):
        return False
    draft.keep(tape.take(1))
    yield from tape.space(draft.keep)
    if key in _NAMES and draft.name is None:
        return (yield from _read_name(tape, draft))
    if key in _ARGUMENTS and not draft.has_arguments:
        return (yield from _read_arguments(tape, draft))
    if key == "id" and (yield from tape.see('"')):
        draft.id = (yield from _read_text(tape, draft)) or None
        return draft.id is not None
    return (yield from read_value(tape, draft.keep))


def _read_name(tape: Tape, draft: _Draft) -> Steps[bool]:
    draft.name = (yield from _read_text(tape, draft)) or None
    if draft.name is None:
        return False
    if not draft.bare or draft.name in draft.tools or draft.has_arguments:
        draft.start()
    return True


def _read_arguments(tape: Tape, draft: _Draft) -> Steps[bool]:
    char = yield from tape.peek()
    if char == "{":
        draft.has_arguments = True
        draft.start()
        return (yield from read_value(tape, draft.found.arguments if draft.started else draft.keep_arguments))
    if char == '"':
        return (yield from _read_quoted_arguments(tape, draft))
    return bool((yield from tape.see("null")) and (yield from read_value(tape, draft.keep)))


def _read_quoted_arguments(tape: Tape, draft: _Draft) -> Steps[bool]:
    """Arguments inside a JSON string, as the API itself has them."""
    text = yield from _read_text(tape, draft)
    if text is None or not is_object(text):
        return False
    draft.has_arguments = True
    draft.arguments.append(text.strip())
    if draft.started:
        draft.found.arguments(text.strip())
    else:
        draft.start()
    return True


def _read_text(tape: Tape, draft: _Draft) -> Steps[str | None]:
    """A string without its quotes; None where there is none. Half a surrogate pair, which UTF-8 has not, becomes ?."""
    pieces: list[str] = []

    def keep(text: str) -> None:
        pieces.append(text)
        draft.keep(text)

    whole = yield from read_string(tape, keep)
    return json.loads("".join(pieces)).encode("utf-8", "replace").decode() if whole else None
