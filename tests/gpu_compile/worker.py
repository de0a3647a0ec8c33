"""Compiles a share of the gate's programs for an H200 and writes down what the rules find, in a process of its own.

`python -m tests.gpu_compile.worker 0 2 out.json` compiles every second program, from the first on. The process of the
tests stays without CUDA's plugin.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxserve import chips

chips.prepare(chips.Device.named("h200"), 1)
os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"

import jax  # noqa: E402 - the process has to be prepared first

from jaxserve.device import audit  # noqa: E402
from jaxserve.device.audit import Expected, Launches  # noqa: E402
from tests.gpu_compile import broken, families  # noqa: E402

FAIL_ON_SPILLS = "xla_gpu_fail_ptx_compilation_on_register_spilling"
SPILLS = re.compile(r"[1-9]\d* bytes spill stores|[1-9]\d* bytes spill loads")

Job = tuple[str, Callable[[], jax.stages.Lowered], Expected, Mapping[str, object]]


def jobs() -> Iterator[Job]:
    for family in families.FAMILIES:
        for name, (program, expected, options) in families.all_programs(family).items():
            yield name, program.lower, expected, options
    for name, toy in broken.toys().items():
        yield f"toy: {name}", toy.lower, toy.expected, toy.options


def findings(job: Job) -> dict[str, object]:
    """What each rule says of a program, and how often it launches something."""
    name, lower, expected, options = job
    spills: list[str] = []
    with said_outside_of_python() as said:
        try:
            program = audit.compiled(name, lower, {**options, FAIL_ON_SPILLS: True})
        except jax.errors.JaxRuntimeError as error:
            if "spilling" not in str(error):
                raise
            spills.append(str(error))
            program = audit.compiled(name, lower, options)
    faults = {rule.__name__: rule(program, expected) for rule in audit.RULES}
    return {
        "faults": {**faults, "no_spills": spills + SPILLS.findall(said[0])},
        "launches": dataclasses.asdict(Launches.of(program)),
        "temporary": program.temporary,
        "seconds": program.seconds,
    }


@contextmanager
def said_outside_of_python() -> Iterator[list[str]]:
    """What is written to standard output and error meanwhile: ptxas and XLA know no Python."""
    said: list[str] = []
    kept = {number: os.dup(number) for number in (1, 2)}
    with tempfile.TemporaryFile("w+") as file:
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield said
        finally:
            for number, old in kept.items():
                os.dup2(old, number)
                os.close(old)
            file.seek(0)
            said.append(file.read())


def main(part: int, parts: int, out: Path) -> None:
    """Writes after each program, so that one that is slow or fails leaves the others' findings."""
    found: dict[str, object] = {}
    for job in list(jobs())[part::parts]:
        found[job[0]] = findings(job)
        out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
