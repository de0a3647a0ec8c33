"""What an engine would need on a device, and how fast its steps could be at best, before there is device or weight.

Every figure is read from the engine's own programs, compiled for that device: sizes from the compiler's account, times
from the bytes that the programs move and the products they compute, over what the chip can do. KV is added by the
length of the sequences, which no program knows. Compiles; loads no weight and runs no step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from jaxserve.chips import Chip, Device
from jaxserve.config import DEMO_MODEL, EngineConfig
from jaxserve.device import audit, memory, topology
from jaxserve.device import mesh as meshes
from jaxserve.device import programs as programlib
from jaxserve.device.audit import Program
from jaxserve.device.programs import Shapes
from jaxserve.launching import size
from jaxserve.models.known import CONFIGS
from jaxserve.weights import source
from jaxserve.weights.checkpoint import Checkpoint
from jaxserve.weights.readers.description import Description

BATCHES = (1, 32, 128)
LENGTHS = (2048, 8192)

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of it that is done, 0..1."""


@dataclass(frozen=True)
class Cost:
    """A program that has to be compiled."""

    name: str
    seconds: float
    """To lower and compile it here, beside others."""
    temporary: int


@dataclass(frozen=True)
class StepTime:
    """A step in which each of `batch` sequences of `context` tokens gets one more, sampled plainly. Per device."""

    batch: int
    context: int
    moved: int
    """Bytes read and written in the device's memory."""
    flops: int
    """Of products with weights."""
    seconds: float | None
    """At least, by what the chip can do; None where nothing is known of that."""
    bound: str | None
    """What decides: memory or compute."""


@dataclass(frozen=True)
class Forecast:
    """Bytes are per device."""

    model: str
    device: str
    devices: int
    estimated: bool
    """Nobody has compiled the gate's models for this chip: its figures are those of a data sheet."""
    usable: int | None
    """What the engine may use of the device; None on a CPU."""
    weights: int
    state: int
    """Rows and workspace."""
    temporary: int
    """What the largest program takes while it runs."""
    reserve: int
    """Kept free on a GPU."""
    pool: int
    token: int
    """KV of one token."""
    tokens: int
    """That the pool holds."""
    concurrency: Mapping[int, int]
    """How many sequences of these lengths the pool holds at once."""
    max_num_seqs: int
    max_model_len: int
    programs: tuple[Cost, ...]
    compile_seconds: float
    """For all of them, two at a time."""
    steps: tuple[StepTime, ...]

    @property
    def allocated(self) -> int:
        """What the engine holds from its start on."""
        return self.weights + self.state + self.pool

    @staticmethod
    def of(config: EngineConfig, device: Device, progress: Progress | None = None) -> Forecast:
        """Compiles every program of this engine for these devices. The process has been prepared by `chips.prepare`.

        Raises:
            ValueError: the model is not described on this machine, or the engine does not fit; says what would.
        """
        mesh = _mesh(config, device)
        chip = device.chip
        usable = int(chip.memory * config.gpu_memory_utilization) if chip else None
        tell = progress or (lambda what, share: None)
        tell("sizing the pool", 0.0)
        sized = size(config, describe(config), mesh, usable)
        began = time.monotonic()
        made = _compiled(sized.shapes, sized.options, tell)
        seconds = time.monotonic() - began
        shapes, needs, longest = sized.shapes, sized.needs, sized.config.max_model_len
        assert isinstance(longest, int)
        pages = shapes.step.pages[0]
        return Forecast(
            model=config.model,
            device=chip.name if chip else "this machine's CPU",
            devices=mesh.size,
            estimated=bool(chip and chip.estimated),
            usable=usable,
            weights=needs.weights,
            state=needs.state,
            temporary=max(p.held for p in made.values() if p.name != "empty"),  # which makes pool and rows
            reserve=memory.RESERVE if chip else 0,
            pool=programlib.nbytes(shapes.kv),
            token=programlib.nbytes(shapes.kv) // (pages * shapes.step.page),
            tokens=(pages - 1) * shapes.step.page,
            concurrency={n: (pages - 1) // -(-n // shapes.step.page) for n in _lengths(longest)},
            max_num_seqs=shapes.rows.rows,
            max_model_len=longest,
            programs=tuple(Cost(p.name, p.seconds, p.temporary) for p in made.values()),
            compile_seconds=seconds,
            steps=tuple(_step(shapes, made, chip, b, min(LENGTHS[0], longest)) for b in _batches(shapes.rows.rows)),
        )


def describe(config: EngineConfig) -> Checkpoint:
    """What the model is: from its files if they are here, or a config.json alone, or what is known of it.

    Raises:
        ValueError: none of them; the message says what to give.
    """
    path = Path(config.model).expanduser()
    if path.is_dir() and not any(path.glob("*.safetensors")):
        return source.open_description(path)
    if path.exists() or config.model == DEMO_MODEL:
        return source.open_checkpoint(source.resolve(config.model))
    if config.model in CONFIGS:
        return Description(CONFIGS[config.model], f"jaxserve/models/known.py: {config.model}")
    raise ValueError(
        f"nothing is known here of model {config.model!r}: give a directory with its config.json (the weights are not "
        f"needed), or one of {', '.join(sorted(CONFIGS))}"
    )


def _mesh(config: EngineConfig, device: Device) -> Mesh:
    ways = config.tensor_parallel_size
    if device.count not in (None, ways):
        raise ValueError(f"device names {device.count} devices, tensor_parallel_size {ways}; set both to the same")
    return topology.mesh(device.chip, ways) if device.chip else meshes.make(ways)


def _compiled(shapes: Shapes, options: dict[str, object], tell: Progress) -> dict[str, Program]:
    todo = programlib.every(shapes)
    made: dict[str, Program] = {}

    def one(program: programlib.Program) -> None:
        made[program.name] = audit.compiled(program.name, program.lower, options, listed=False)
        tell("compiling", len(made) / len(todo))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, todo))
    return {program.name: made[program.name] for program in todo}


def _lengths(longest: int) -> Sequence[int]:
    return sorted({*(n for n in LENGTHS if n < longest), longest})


def _batches(rows: int) -> Sequence[int]:
    return sorted({min(batch, rows) for batch in BATCHES})


def _step(shapes: Shapes, made: Mapping[str, Program], chip: Chip | None, batch: int, context: int) -> StepTime:
    tokens = next(t for t in shapes.buckets.tokens if t >= batch)
    rows = next(r for r in shapes.buckets.rows if r >= batch)
    pools = frozenset(dims for a in shapes.kv for dims in _views(a))
    parts = [made[f"forward {tokens}"].module, made[f"sample {rows}"].module]
    kept = programlib.nbytes(shapes.kv) // (shapes.step.pages[0] * shapes.step.page)
    moved = sum(part.moved(without=pools) for part in parts) + batch * context * kept
    flops = sum(part.flops() for part in parts)
    if chip is None:
        return StepTime(batch, context, moved, flops, None, None)
    times = {"memory": moved / chip.bandwidth, "compute": flops / chip.peak}
    bound = max(times, key=lambda name: times[name])
    return StepTime(batch, context, moved, flops, times[bound], bound)


def _views(pool: jax.ShapeDtypeStruct) -> tuple[tuple[int, ...], ...]:
    """The pool's dims on one device, as XLA's attention and as the kernel see them."""
    own = tuple(pool.sharding.shard_shape(pool.shape))
    return own, (math.prod(own[:-2]), *own[-2:])
