"""Reads Python literals as they arrive and hands them on as JSON. Knows nothing of tools.

Strings in either quote, numbers, True, False, None and JSON's words, lists, tuples, dicts with strings as keys, of any
depth. JSON is read too, as itself without its whitespace.
"""

from __future__ import annotations

import json
import math
import re
from enum import Enum, auto

from server.parsers.engine import Sink, Steps, Tape, done, nowhere
from server.parsers.json_text import is_scalar, read_value

_PLAIN = {quote: re.compile(rf"[^{quote}\\]*") for quote in "'\""}
_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": "",
    "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_CODES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+", re.ASCII)


class _Next(Enum):
    VALUE = auto()
    ITEM_OR_END = auto()
    KEY_OR_END = auto()
    COLON = auto()
    COMMA_OR_END = auto()


_VALUES = (_Next.VALUE, _Next.ITEM_OR_END)
_ENDS = (_Next.ITEM_OR_END, _Next.KEY_OR_END, _Next.COMMA_OR_END)


def read_literal(tape: Tape, sink: Sink) -> Steps[bool]:
    """Read one literal. False: the text ended in it, or what comes next is none (and is not read)."""
    closers: list[str] = []
    expected: _Next = _Next.VALUE
    comma = ""
    while True:
        if closers:
            yield from tape.space(nowhere)
        char = yield from tape.peek()
        if closers and char == closers[-1] and expected in _ENDS:
            tape.take(1)
            sink("}" if closers.pop() == "}" else "]")
            expected = _Next.COMMA_OR_END
        elif char == "," and expected is _Next.COMMA_OR_END:
            comma = tape.take(1)
            expected = _Next.KEY_OR_END if closers[-1] == "}" else _Next.ITEM_OR_END
            continue
        elif char == ":" and expected is _Next.COLON:
            sink(tape.take(1))
            expected = _Next.VALUE
            continue
        elif char in _CLOSERS and expected in _VALUES:
            sink(comma + ("{" if char == "{" else "["))
            closers.append(_CLOSERS[tape.take(1)])
            expected = _Next.KEY_OR_END if char == "{" else _Next.ITEM_OR_END
        elif char in _PLAIN and expected in (*_VALUES, _Next.KEY_OR_END):
            sink(comma)
            if not (yield from _read_string(tape, sink)):
                return False
            expected = _Next.COLON if expected is _Next.KEY_OR_END else _Next.COMMA_OR_END
        elif expected in _VALUES:
            sink(comma)
            if not (yield from _read_scalar(tape, sink)):
                return False
            expected = _Next.COMMA_OR_END
        else:
            return False
        comma = ""
        if not closers and expected is _Next.COMMA_OR_END:
            return True


def json_of_literal(text: str) -> str | None:
    """`text` as JSON: itself if it is JSON, what it means if it is a Python literal, None otherwise."""
    for read in (read_value, read_literal):
        tape = Tape(text.strip())
        tape.close()
        pieces: list[str] = []
        if done(read(tape, pieces.append)) and not tape.held:
            return "".join(pieces)
    return None


def inside_string(text: str) -> str:
    """`text` as it is written between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _read_string(tape: Tape, sink: Sink) -> Steps[bool]:
    quote = tape.take(1)
    sink('"')
    while True:
        yield from tape.run(_PLAIN[quote], lambda text: sink(inside_string(text)))
        if (yield from tape.peek()) == quote:
            tape.take(1)
            sink('"')
            return True
        if not (yield from _read_escape(tape, sink)):
            return False


def _read_escape(tape: Tape, sink: Sink) -> Steps[bool]:
    pair = yield from tape.peek(2)
    if len(pair) < 2:
        return False
    digits = _CODES.get(pair[1], 0)
    code = (yield from tape.peek(2 + digits))[2:]
    if not digits:
        sink(inside_string(_ESCAPES.get(pair[1], pair)))
    elif len(code) < digits or not _HEX.fullmatch(code) or int(code, 16) > 0x10FFFF:
        return False
    else:
        sink(json.dumps(chr(int(code, 16)))[1:-1])
    tape.take(2 + digits)
    return True


def _read_scalar(tape: Tape, sink: Sink) -> Steps[bool]:
    pieces: list[str] = []
    yield from tape.run(_SCALAR, pieces.append)
    word = "".join(pieces)
    text = _json_of_scalar(word)
    sink(text or word)
    return bool(text)


def _json_of_scalar(word: str) -> str:
    word = _WORDS.get(word, word)
    if is_scalar(word):
        return word
    plain = word.replace("_", "").removeprefix("+")
    if is_scalar(plain):
        return plain
    try:
        value = int(plain, 0) if "x" in plain.lower() else float(plain)
        return json.dumps(value) if math.isfinite(value) else ""
    except (ValueError, OverflowError):
        return ""
