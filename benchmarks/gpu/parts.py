"""The parts of the benchmark, the most important first, and how one of them runs: in a process of its own.

So no part holds another's memory, each may be stopped when its time is over, and one that fails takes nothing along.
A part is a module with `measure(size, work, argument)`, which gives rows as it finds them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.record import Done, Row, State, read_rows

SKIPPED = 3
"""Exit status of a part that says on its last line why it cannot run here."""


class Skip(Exception):
    """A part cannot be measured here; the message says why."""


def each(measurements: Iterable[Callable[[], Iterable[Row]]]) -> Iterator[Row]:
    """The rows of measurements that do not depend on each other: one that fails stops none of the others.

    Raises:
        RuntimeError: at the end, what has failed.
    """
    failed = []
    for measurement in measurements:
        try:
            yield from measurement()
        except Exception as e:
            traceback.print_exc()
            failed.append(" ".join(f"{type(e).__name__}: {e}".split())[:300])
    if failed:
        raise RuntimeError("; ".join(failed))


@dataclass(frozen=True)
class Work:
    """Where a part works, and since when."""

    folder: Path
    """Shared by the parts: the model's directory and the compile cache are in it."""
    began: float
    """When the part's process was started, on the wall clock."""


@dataclass(frozen=True)
class Part:
    name: str
    module: str
    seconds: float
    """Its share of the time, at most."""
    argument: str = ""


VARIANTS: Mapping[str, Mapping[str, object]] = {
    "as served": {},
    "unrolled layers": {"xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL"},
    "Triton GEMM": {"xla_gpu_enable_triton_gemm": True},
    "no CUDA graphs": {"xla_gpu_enable_command_buffer": ""},
    "trace cache of 256": {"xla_cmd_buffer_trace_cache_size": 256},
    "unrolled, no CUDA graphs": {
        "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL",
        "xla_gpu_enable_command_buffer": "",
    },
}
"""Compiler options, beside the engine's own, that are compared on the real engine."""


def parts(toy: bool) -> tuple[Part, ...]:
    """All of them; at toy size one variant stands for all."""
    variants = list(VARIANTS)[1:2] if toy else list(VARIANTS)
    return (
        Part("ceilings", "benchmarks.gpu.ceilings", 40),
        Part("serving", "benchmarks.gpu.serving", 300),
        Part("start again", "benchmarks.gpu.restart", 90),
        Part("kernels", "benchmarks.gpu.kernels", 90),
        Part("transformers", "benchmarks.gpu.reference", 60),
        *(Part(f"variant: {name}", "benchmarks.gpu.variants", 60, name) for name in variants),
    )


def run(part: Part, folder: Path, *, toy: bool, seconds: float) -> Done:
    """Runs a part for `seconds` at most. What it says goes to a log beside its rows."""
    name = "".join(c if c.isalnum() else "-" for c in part.name)
    rows, log = folder / f"{name}.rows", folder / f"{name}.log"
    rows.unlink(missing_ok=True)
    begin = time.monotonic()
    words = [sys.executable, "-m", "benchmarks.gpu.child", part.module, str(folder), str(rows), str(time.time())]
    words += ["toy" if toy else "full", part.argument]
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    state, reason = _outcome(status, log.read_text(errors="replace").strip().splitlines())
    return Done(state, round(time.monotonic() - begin, 2), reason, read_rows(rows))


def _outcome(status: int | None, said: Sequence[str]) -> tuple[State, str]:
    last = said[-1] if said else "it said nothing"
    if status == 0:
        return "done", ""
    if status is None:
        return "cut", "its time ran out"
    return ("skipped", last) if status == SKIPPED else ("failed", last)
