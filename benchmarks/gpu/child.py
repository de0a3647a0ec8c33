"""The process of one part: `python -m benchmarks.gpu.child MODULE FOLDER ROWS BEGAN SIZE ARGUMENT`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from benchmarks.gpu.parts import SKIPPED, Skip, Work
from benchmarks.gpu.record import write_row
from benchmarks.gpu.sizes import FULL, TOY


def main(module: str, folder: str, rows: str, began: str, size: str, argument: str) -> int:
    measure = importlib.import_module(module).measure
    try:
        for row in measure(TOY if size == "toy" else FULL, Work(Path(folder), float(began)), argument):
            write_row(Path(rows), row)
            print(row, flush=True)
    except Skip as why:
        print(why)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
