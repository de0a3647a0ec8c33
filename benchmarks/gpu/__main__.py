"""Everything there is to know about this engine on one GPU, in one command, offline, with a limit of time.

    python -m benchmarks.gpu --budget 450

Parts run one after the other, the most important first, each in its own process. After each part the results are in
FILE; the same command again continues where the time ran out. `--toy` runs the same code at toy size,
on a CPU too.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.parts import parts, run
from benchmarks.gpu.record import Record, table, together

LEAST_SECONDS = 10
"""A part is not begun with less than that."""
PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "numpy", "torch", "transformers", "triton")


def card() -> tuple[str, str]:
    """Name and driver of the first GPU; CPU and nothing where there is none."""
    if shutil.which("nvidia-smi") is None:
        return "CPU", ""
    words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    said = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()
    name, _, driver = said[0].partition(", ") if said else ("CPU", "", "")
    return name, driver


def versions(driver: str) -> dict[str, str]:
    """Of what is installed."""
    found = {"driver": driver, "python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=450, metavar="SECONDS", help="for all parts together")
    parser.add_argument("--folder", type=Path, default=Path("build/gpu"), help="logs, compile cache, results")
    parser.add_argument("--toy", action="store_true", help="toy size, on a CPU too: to see that everything runs")
    parser.add_argument("--again", nargs="+", default=[], metavar="PART", help="parts to measure again")
    parser.add_argument("--results", type=Path, metavar="FILE", help="instead of FOLDER/results.json")
    given = parser.parse_args()
    name, driver = card()
    if name == "CPU" and not given.toy:
        parser.error("there is no NVIDIA GPU here; --toy runs everything at toy size on a CPU")
    record, file = Record("toy" if given.toy else "full", name, versions(driver)), given.results
    file = file or given.folder / "results.json"
    given.folder.mkdir(parents=True, exist_ok=True)
    if file.exists():
        earlier = Record.load(file)
        if not earlier.same_machine(record):
            parser.error(f"{file} is of another size, card or version; choose another --folder")
        record = earlier
    everything = parts(given.toy)
    unknown = set(given.again) - {part.name for part in everything}
    if unknown:
        parser.error(f"no part {unknown.pop()!r}; there are: {', '.join(part.name for part in everything)}")
    record.dates.append(datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"))
    end = time.monotonic() + given.budget
    for part in everything:
        done = record.parts.get(part.name)
        if part.name in record.over() and part.name not in given.again:
            continue
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"no time is left for {part.name}: start again to measure it", flush=True)
            continue
        print(f"{part.name} ...", flush=True)
        new = run(part, given.folder, toy=given.toy, seconds=left if given.toy else min(part.seconds, left))
        record.parts[part.name] = together(done, new)
        record.save(file)
    print(table(record))
    return 0 if all(part.name in record.over() for part in everything) else 1


if __name__ == "__main__":
    sys.exit(main())
