"""What a text machine finds, piece by piece. Streamed and whole answers are the same events."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct


class Content(Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text that the model thought."""

    text: str


class CallStart(Struct, frozen=True):
    """Tool call `index` (0, 1, ...) begins. `id`: where the model's format has one."""

    index: int
    name: str
    id: str | None = None


class Arguments(Struct, frozen=True):
    """More of the arguments of call `index`; joined, a JSON text."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
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
