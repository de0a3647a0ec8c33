"""Reads JSON as it arrives and hands its text on unchanged. Knows nothing of tools.

A value that was read to its end is valid JSON. One repair is made: control characters inside strings, which JSON
forbids and models write, become escapes.
"""

from __future__ import annotations

import json
import re
from enum import Enum, auto

from server.parsers.engine import Sink, Steps, Tape, done

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_VALID = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f]")
_HEX = re.compile(r"[0-9a-fA-F]{4}", re.ASCII)
_ESCAPES = {code: json.dumps(chr(code))[1:-1] for code in range(32)}


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()
    KEY = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


_VALUES = (_Next.VALUE, _Next.VALUE_OR_END)
_KEYS = (_Next.KEY, _Next.KEY_OR_END)
_ENDS = (_Next.VALUE_OR_END, _Next.KEY_OR_END, _Next.COMMA_OR_END)


def read_value(tape: Tape, sink: Sink) -> Steps[bool]:
    """Read one value, of any depth. False: the text ended in it, or what comes next is no JSON (and is not read)."""
    closers: list[str] = []
    expected: _Next = _Next.VALUE
    while True:
        if closers:
            yield from tape.space(sink)
        char = yield from tape.peek()
        if char == '"' and expected in _VALUES + _KEYS:
            if not (yield from read_string(tape, sink)):
                return False
            expected = _Next.COLON if expected in _KEYS else _Next.COMMA_OR_END
        elif char and char in "{[" and expected in _VALUES:
            sink(tape.take(1))
            closers.append("}" if char == "{" else "]")
            expected = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
        elif closers and char == closers[-1] and expected in _ENDS:
            sink(tape.take(1))
            closers.pop()
            expected = _Next.COMMA_OR_END
        elif char == "," and expected is _Next.COMMA_OR_END:
            sink(tape.take(1))
            expected = _Next.KEY if closers[-1] == "}" else _Next.VALUE
        elif char == ":" and expected is _Next.COLON:
            sink(tape.take(1))
            expected = _Next.VALUE
        elif expected in _VALUES and (yield from _read_scalar(tape, sink)):
            expected = _Next.COMMA_OR_END
        else:
            return False
        if not closers and expected is _Next.COMMA_OR_END:
            return True


def read_string(tape: Tape, sink: Sink) -> Steps[bool]:
    """Read one string with its quotes; False as in `read_value`."""
    if (yield from tape.peek()) != '"':
        return False
    sink(tape.take(1))
    while True:
        yield from tape.run(_PLAIN, lambda text: sink(_repaired(text)))
        if (yield from tape.peek()) == '"':
            sink(tape.take(1))
            return True
        size = yield from _escape(tape)
        if not size:
            return False
        sink(tape.take(size))


def is_object(text: str) -> bool:
    """Whether `text` is one JSON object and nothing else."""
    tape = Tape(text.strip())
    tape.close()
    return text.lstrip().startswith("{") and done(read_value(tape, lambda _: None)) and not tape.held


def is_scalar(text: str) -> bool:
    """Whether `text` is a JSON number, true, false or null."""
    return _VALID.fullmatch(text) is not None


def _repaired(text: str) -> str:
    return text.translate(_ESCAPES) if _CONTROL.search(text) else text


def _escape(tape: Tape) -> Steps[int]:
    pair = yield from tape.peek(2)
    if pair == "\\u":
        return 6 if _HEX.fullmatch((yield from tape.peek(6))[2:]) else 0
    return 2 if len(pair) == 2 and pair[1] in '"\\/bfnrt' else 0


def _read_scalar(tape: Tape, sink: Sink) -> Steps[bool]:
    pieces: list[str] = []

    def keep(text: str) -> None:
        pieces.append(text)
        sink(text)

    yield from tape.run(_SCALAR, keep)
    return is_scalar("".join(pieces))
