"""Reads XLA's list of what a GPU program launches (thunks), as it stands after CUDA graphs have been cut.

XLA writes it where `xla_dump_to` says: the sequence as an indented tree, and beside it which instruction of the HLO
each number belongs to. Knows nothing of models.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

COMMAND_BUFFER = "kCommandBuffer"
"""What becomes one CUDA graph."""
_LINE = re.compile(r"( *)(\d+): (k\w+)")
_INFO = re.compile(r'profile_annotation: "([^"]*)"(?:\s*thunk_id: (\d+))?')
_HOLDERS = {COMMAND_BUFFER, "kSequential", "kWhile", "kConditional", "kDynamicSliceFusion", "kAsyncStart", "kAsyncDone"}


@dataclass(frozen=True)
class Thunk:
    """A launch, or something that holds launches."""

    kind: str
    name: str
    """Of its instruction in the HLO."""
    section: str
    """Of a loop or conditional around it: `condition`, `body`, `true_branch` ..."""
    around: tuple[Thunk, ...]
    """From outside in."""

    @property
    def launches(self) -> bool:
        return self.kind not in _HOLDERS

    @property
    def in_graph(self) -> bool:
        return any(outer.kind == COMMAND_BUFFER for outer in self.around)

    def inside(self, loop: str) -> bool:
        """In the body of the loop of this name, and in no loop within it."""
        loops = [(outer.name, self._within(outer)) for outer in self.around if outer.kind == "kWhile"]
        return bool(loops) and loops[-1] == (loop, "body")

    def _within(self, outer: Thunk) -> str:
        path = (*self.around, self)
        return path[path.index(outer) + 1].section


def read(sequence: str, metadata: str) -> tuple[Thunk, ...]:
    """All of them in their order, from the text of `thunk_sequence_after_thunk_passes` and of `thunk_metadata`."""
    names = {number: name for name, number in _INFO.findall(metadata) if number}
    found: list[Thunk] = []
    path: list[tuple[int, Thunk]] = []
    sections: dict[int, str] = {}
    header = ""
    for line in sequence.splitlines():
        if not (match := _LINE.match(line)):
            header = line.strip().removesuffix(":") if line.strip().endswith(":") else ""  # a branch without thunks
            continue
        indent = len(match[1])
        while path and path[-1][0] >= indent:
            path.pop()
        around = tuple(thunk for _, thunk in path)
        if header:
            sections[len(path)], header = header, ""
        chosen = path and path[-1][1].kind in ("kWhile", "kConditional")
        section = sections.get(len(path), "") if chosen else ""
        thunk = Thunk(match[3], names.get(str(int(match[2])), ""), section, around)
        found.append(thunk)
        path.append((indent, thunk))
    return tuple(found)
