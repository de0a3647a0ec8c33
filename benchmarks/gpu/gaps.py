"""How long the device stood still between steps, read from a trace of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions

SHORT = 10e-6
"""Seconds. What is shorter lies between two kernels of one program; longer, and the device waited for the host."""


@dataclass(frozen=True)
class Idle:
    """Seconds, of the whole trace."""

    busy: float
    between_kernels: float
    waiting: float
    """In gaps of `SHORT` or more."""


def tracing(folder: Path):
    """Traces what runs within it, without the Python calls, which would slow it down."""
    options = ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    return jax.profiler.trace(str(folder), profiler_options=options)


def read(folder: Path) -> Idle | None:
    """Of the latest trace in a folder; None where it saw no device at work."""
    file = max(folder.rglob("*.xplane.pb"), key=lambda f: f.stat().st_mtime)
    spans = [
        (event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9)
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        if _is_device(plane.name, line.name)
        for event in line.events
    ]
    return idle(spans) if spans else None


def _is_device(plane: str, line: str) -> bool:
    """A stream of the first GPU, or a thread of the CPU device."""
    return (plane == "/device:GPU:0" and line.startswith("Stream")) or (
        plane == "/host:CPU" and line.startswith("tf_XLAPjRtCpuClient")
    )


def idle(spans: Iterable[tuple[float, float]]) -> Idle:
    """From begin and end of everything that ran, in any order and overlapping."""
    ordered = sorted(spans)
    end, busy, short, long = ordered[0][0], 0.0, 0.0, 0.0
    for first, last in ordered:
        gap = first - end
        if gap >= SHORT:
            long += gap
        elif gap > 0:
            short += gap
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return Idle(busy, short, long)
