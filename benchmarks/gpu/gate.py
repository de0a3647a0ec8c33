"""The rules of the H200 gate once more, on programs that this GPU's own compiler and autotuner have made."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.record import Row
from jaxserve.device import audit, programs
from jaxserve.device.audit import Expected
from jaxserve.device.programs import Shapes
from jaxserve.launching import GPU_OPTIONS

TOKENS, ROWS = (1, 16, 256, 2048), (1, 16, 256)
"""Sizes that are checked, as far as the engine has them; else its largest."""


def check(shapes: Shapes, layers: int) -> Iterator[Row]:
    """Compiles programs of an engine of these shapes, whose memory is free again, and counts their faults."""
    for tokens in _chosen(shapes.buckets.tokens, TOKENS):
        yield from _check(shapes, programs.forward(shapes, tokens), Expected.of_forward(shapes, tokens, layers))
    for rows in _chosen(shapes.buckets.rows, ROWS):
        yield from _check(shapes, programs.sample(shapes, rows, full=False), Expected.of_sample(shapes, rows))


def _chosen(sizes: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in sizes if size in wanted) or sizes[-1:]


def _check(shapes: Shapes, program: programs.Program, expected: Expected) -> Iterator[Row]:
    options = GPU_OPTIONS if shapes.mesh.devices.flat[0].platform == "gpu" else {}
    made = audit.compiled(program.name, program.lower, options)
    faults = [f"{rule.__name__}: {fault}" for rule in audit.RULES for fault in rule(made, expected)]
    launches = audit.Launches.of(made)
    yield Row(f"faults of {program.name}", len(faults), "", note="; ".join(faults)[:200])
    note = f"in {launches.graphs} CUDA graphs; {launches.rest} outside of the layers"
    yield Row(f"launches a layer, {program.name}", launches.layer, "", note=note)
