"""What a text machine finds, piece by piece. Streamed and whole answers are the same events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Tool call `index` (0, 1, ...) begins. `id`: where the model's format has one."""

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of call `index`; joined, a JSON text."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call `index` is complete."""

    index: int


type Event = Content | Reasoning | CallStart | Arguments | CallEnd


class Machine(Protocol):
    """Text in, events out. The events of a text do not depend on how it is cut into pieces, once joined."""

    def feed(self, text: str) -> list[Event]:
        """What is certain after this text."""
        ...

    def end(self) -> list[Event]:
        """The text has ended: what was held back."""
        ...
