"""What models think before they answer: the tagged kinds, where a pair of markers surrounds it.

Whitespace on either side of a marker is neither thought nor answer. Only the first block is reasoning; markers later in
the answer are its text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from server.parsers.engine import Found, Markers, Reader, Steps, Tape, TextMachine

_HEADER = re.compile(r"(>|assistant:?)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models shows its thoughts. `specials`: texts that may be special tokens and must reach
    the machine.

    `opened(prompt)`: the rendered prompt ends inside a thinking block, so that the answer starts as thought; this is
    what `machine` takes. `thinks(prompt)`: the model is expected to think first, with or without writing `start`.
    """

    name: str
    start: str
    end: str
    specials: tuple[str, ...]
    opened: Callable[[str], bool]
    thinks: Callable[[str], bool]
    reader: Callable[[bool], Reader]

    def machine(self, opened: bool) -> TextMachine:
        """Tells thought from answer."""
        return TextMachine(self.reader(opened))


def tagged(
    name: str, start: str, end: str, *, opened: Callable[[str], bool], thinks: Callable[[str], bool]
) -> ReasoningFormat:
    """Thoughts between two markers, of which the first may have been part of the prompt."""

    def reader(inside: bool) -> Reader:
        return lambda tape, found: _read(tape, found, inside)

    ends = Markers(end)

    def _read(tape: Tape, found: Found, inside: bool) -> Steps[None]:
        yield from tape.space(found.reasoning if inside else found.content)
        if (yield from tape.accept(start)) or inside:
            found.turn()
            if (yield from tape.until(ends, found.reasoning)):
                found.turn()

    return ReasoningFormat(name, start, end, (start, end), opened, thinks, reader)


def _opened(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")


def _expected(prompt: str) -> bool:
    """The prompt ends with the header of the answer or an open block: not with a closed one, nor with some answer."""
    return _HEADER.search(prompt[-200:]) is not None and not prompt.rstrip().endswith("</think>")


QWEN3 = tagged("qwen3", "<think>", "</think>", opened=_opened, thinks=_expected)
DEEPSEEK_R1 = tagged("deepseek_r1", "<think>", "</think>", opened=_expected, thinks=_expected)
