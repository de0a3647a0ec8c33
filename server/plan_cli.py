"""`jaxserve plan`: what an engine would need on a GPU that is not here, and how fast it could be.

Prepares the process before jax is imported: it compiles for the device that is named, and runs nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jaxserve
from jaxserve import chips
from jaxserve.chips import Device
from server import flags
from server.terminal import LoadingLine

if TYPE_CHECKING:
    from jaxserve import Forecast

GIB = 2**30


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The engine's options, and those of the plan."""
    _add_own(parser)
    flags.add_flags(parser, flags.ENGINE)


def plan(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Prints the plan; returns the process's exit status, 1 where the engine does not fit."""
    if {"-h", "--help"} & {*words}:
        parser.parse_args(words)
    own_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own(own_parser)
    own, rest = own_parser.parse_known_args(words)
    engine_parser = argparse.ArgumentParser(prog=parser.prog, add_help=False, allow_abbrev=False)
    flags.add_flags(engine_parser, flags.ENGINE)
    config = flags.read_engine_flags(engine_parser, rest)
    line = LoadingLine(sys.stderr)
    try:
        device = Device.named(own.device)
        chips.prepare(device, config.tensor_parallel_size)
        found = jaxserve.Forecast.of(config, device, progress=line.show)
    except ValueError as error:
        line.clear()
        print(f"error: {error}", file=sys.stderr)
        return 1
    line.clear()
    print(json.dumps(dataclasses.asdict(found), indent=2) if own.json else "\n".join(_lines(found)))
    return 0


def _add_own(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("plan")
    known = ", ".join((*chips.chips(), chips.CPU))
    group.add_argument(
        "--device", default="h200", metavar="NAME", help=f"{known}; h200x4 for several (default: %(default)s)"
    )
    group.add_argument("--json", action="store_true", help="the figures as JSON; bytes, seconds")


def _lines(f: Forecast) -> Iterator[str]:
    guess = ", by its data sheet: estimated" if f.estimated else ""
    yield f"{f.model} on {f.devices} x {f.device}{guess}"
    yield ""
    share = "" if f.usable is None else f", of {f.usable / GIB:.1f} GiB that it may use"
    yield f"memory of each device{share}"
    parts = {"weights": f.weights, "rows": f.state, "largest program": f.temporary, "kept free": f.reserve}
    yield from (f"  {name:16} {size / GIB:8.2f} GiB" for name, size in parts.items())
    yield f"  {'KV':16} {f.pool / GIB:8.2f} GiB: {f.tokens:,} tokens of {f.token:,} bytes"
    yield ""
    yield f"sequences at once (max_num_seqs {f.max_num_seqs})"
    yield from (f"  of {length:7,} tokens {count:8,}" for length, count in f.concurrency.items())
    yield ""
    yield f"programs: {len(f.programs)}, compiled here in {f.compile_seconds:.0f} s"
    yield ""
    yield f"a step at best, sequences of {f.steps[0].context:,} tokens"
    for step in f.steps:
        work = f"{step.moved / 1e9:7.2f} GB {step.flops / 1e9:9.1f} GFLOP"
        if step.seconds is None:
            yield f"  batch {step.batch:4} {work}"
        else:
            rate = f"{1000 * step.seconds:7.2f} ms {step.batch / step.seconds:9,.0f} tokens/s"
            yield f"  batch {step.batch:4} {work} {rate}, bound by {step.bound}"
