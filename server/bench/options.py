"""What the flags of the bench commands have in common: values that are read from words, files that are written."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from server.bench.command import BenchError


def positive(text: str) -> int:
    """For argparse: an integer of at least 1."""
    return _at_least(text, 1)


def count(text: str) -> int:
    """For argparse: an integer of at least 0."""
    return _at_least(text, 0)


def rate(text: str) -> float:
    """For argparse: a number above 0, inf among them."""
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0 or inf, got {text!r}")
    return value


def seconds(text: str) -> float:
    """For argparse: 0 or more."""
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text!r}")
    return value


def json_object(text: str) -> dict[str, object]:
    """For argparse."""
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}") from None


def pairs(words: Sequence[str], flag: str, sign: str = "=") -> dict[str, str]:
    """`KEY=VALUE` words.

    Raises:
        ValueError: one has no sign or no key.
    """
    found: dict[str, str] = {}
    for word in words:
        key, between, value = word.partition(sign)
        if not between or not key:
            raise ValueError(f"{flag} takes NAME{sign}VALUE, got {word!r}")
        found[key] = value
    return found


def write_json(path: Path, found: object) -> None:
    """A file for people and scripts, with its folder where that is not there.

    Raises:
        BenchError: it cannot be written.
    """
    write(path, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def write(path: Path, data: bytes) -> None:
    """A file, with its folder where that is not there.

    Raises:
        BenchError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BenchError(f"cannot write {path}: {error.strerror}") from None


def _at_least(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {low}, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
