"""Where a start spends its time: phases, some beside one another, told in one line of the log and read from there."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LINE = re.compile(r"start-up: (.+); ([\d.]+) s of CPU since the process began")
_PHASE = re.compile(r"(.+) ([\d.]+)-([\d.]+)")


@dataclass(frozen=True)
class Phase:
    """Seconds since the timeline began."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Told:
    """What a line of the log says."""

    phases: tuple[Phase, ...]
    cpu: float
    """Seconds that all threads have computed, imports included."""


class Timeline:
    """Begins when it is made. Phases may come from any thread."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._phases: list[Phase] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.monotonic() - self._began
        yield
        self._phases.append(Phase(name, begin, time.monotonic() - self._began))

    def __str__(self) -> str:
        phases = sorted(self._phases, key=lambda phase: phase.begin)
        listed = ", ".join(f"{phase.name} {phase.begin:.2f}-{phase.end:.2f}" for phase in phases)
        return f"start-up: {listed}; {time.process_time():.2f} s of CPU since the process began"


def read(line: str) -> Told | None:
    """The timeline in a line, if there is one."""
    found = _LINE.search(line)
    if found is None:
        return None
    phases = [_PHASE.fullmatch(text) for text in found[1].split(", ")]
    return Told(tuple(Phase(m[1], float(m[2]), float(m[3])) for m in phases if m), float(found[2]))
