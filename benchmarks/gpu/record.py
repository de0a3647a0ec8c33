"""What was measured: rows, parts, the file that keeps them between runs, and the table.

Plain Python: the process that keeps the record must not hold the GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["done", "skipped", "failed", "cut"]
"""cut: its time ran out; what it had measured by then is kept."""


@dataclass(frozen=True)
class Piece:
    """The least that some work must move and compute, `times` over."""

    bytes: float
    flops: float
    times: float = 1.0


@dataclass(frozen=True)
class Row:
    """One figure."""

    name: str
    value: float
    unit: str
    seconds: float = 0.0
    """What the work of `least` took; 0.0: there is none."""
    least: tuple[Piece, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Done:
    """How a part went."""

    state: State
    seconds: float
    reason: str = ""
    rows: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Ceilings:
    """What this card does at most, measured."""

    bandwidth: float
    """Bytes a second."""
    rate: float
    """bfloat16 operations a second."""

    def seconds(self, least: Sequence[Piece]) -> float:
        """The shortest that such work can take: each piece is bound by memory or by arithmetic."""
        return sum(p.times * max(p.bytes / self.bandwidth, p.flops / self.rate) for p in least)


@dataclass(frozen=True)
class Aim:
    at_most: float | None = None
    at_least: float | None = None

    def met(self, value: float) -> bool:
        low = self.at_least is None or value >= self.at_least
        return low and (self.at_most is None or value <= self.at_most)

    def __str__(self) -> str:
        return f"<= {self.at_most:g}" if self.at_most is not None else f">= {self.at_least:g}"


COPY, PRODUCT = "copy, read and written", "matrix product, bfloat16"
CROWD, ALONE, RATIO = "output of the crowd", "output, one request at a time", "crowd over transformers"
AIMS: Mapping[str, Aim] = {
    "a token, batch 1": Aim(at_most=4.2),
    "a token, batch 32": Aim(at_most=5.5),
    "output, batch 128": Aim(at_least=14_000),
    CROWD: Aim(at_least=8_000),
    "idle between steps, batch 1": Aim(at_most=0.2),
    "idle between steps, batch 32": Aim(at_most=0.2),
    "idle between steps, batch 128": Aim(at_most=0.2),
    "ready, warm": Aim(at_most=60),
    "ready, cold": Aim(at_most=180),
    RATIO: Aim(at_least=24),
}
"""For one H200 and Llama-3.1-8B in bfloat16, by the name of the row."""


@dataclass
class Record:
    """All of a run, as the JSON file has it."""

    size: str
    card: str
    versions: Mapping[str, str]
    dates: list[str] = field(default_factory=list[str])
    """When it was started, and started again."""
    parts: dict[str, Done] = field(default_factory=dict[str, Done])

    @staticmethod
    def load(file: Path) -> Record:
        data = json.loads(file.read_text())
        data["parts"] = {name: _done(part) for name, part in data["parts"].items()}
        return Record(**data)

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        new = file.with_suffix(".new")
        new.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        new.replace(file)

    def same_machine(self, other: Record) -> bool:
        """And the same versions; another driver is allowed."""
        mine, others = ({**r.versions, "driver": ""} for r in (self, other))
        return (self.size, self.card, mine) == (other.size, other.card, others)

    def over(self) -> set[str]:
        """The parts that need not be measured again."""
        return {name for name, part in self.parts.items() if part.state in ("done", "skipped")}

    def rows(self) -> dict[str, Row]:
        return {row.name: row for part in self.parts.values() for row in part.rows}

    def ceilings(self) -> Ceilings | None:
        rows = self.rows()
        if COPY not in rows or PRODUCT not in rows:
            return None
        return Ceilings(rows[COPY].value * 1e9, rows[PRODUCT].value * 1e12)


def read_rows(file: Path) -> tuple[Row, ...]:
    """Rows that a part has written, one a line; a last line that is cut off does not count."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return tuple(_row(json.loads(line)) for line in lines)


def write_row(file: Path, row: Row) -> None:
    with file.open("a") as f:
        f.write(json.dumps(dataclasses.asdict(row)) + "\n")


def _row(data: dict) -> Row:
    return Row(**{**data, "least": tuple(Piece(**piece) for piece in data["least"])})


def _done(data: dict) -> Done:
    return Done(**{**data, "rows": tuple(_row(row) for row in data["rows"])})


def together(earlier: Done | None, new: Done) -> Done:
    """A part that was measured again; what only the earlier run has found is kept."""
    if earlier is None or new.state == "done":
        return new
    names = {row.name for row in new.rows}
    kept = tuple(row for row in earlier.rows if row.name not in names)
    return dataclasses.replace(new, rows=kept + new.rows)


def ratio(rows: Mapping[str, Row]) -> Row | None:
    """How many times the tokens a second of transformers."""
    if CROWD not in rows or ALONE not in rows:
        return None
    return Row(RATIO, rows[CROWD].value / rows[ALONE].value, "x")


def table(record: Record) -> str:
    """Everything, one line a row; a share of the roofline where the ceilings are known, aims at full size."""
    lines = [
        f"{record.card}, {record.size} size, {', '.join(record.dates)}",
        ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        f"{'part':<24} {'what':<44} {'value':>12} {'unit':<10} {'roofline':>8}  aim",
    ]
    last = ratio(record.rows())
    parts = dict(record.parts)
    if last is not None:
        parts["comparison"] = Done("done", 0.0, rows=(last,))
    for name, part in parts.items():
        lines += [_line(name, row, record) for row in part.rows]
        if part.state != "done":
            lines.append(f"{name:<24} {part.state} after {part.seconds:.0f} s: {part.reason}")
    return "\n".join(lines)


def _line(part: str, row: Row, record: Record) -> str:
    return " ".join(_cells(part, row, record)).rstrip()


def _cells(part: str, row: Row, record: Record) -> Iterator[str]:
    yield f"{part:<24} {row.name:<44} {row.value:>12.4g} {row.unit:<10}"
    ceilings = record.ceilings()
    known = ceilings is not None and row.least and row.seconds
    yield f"{ceilings.seconds(row.least) / row.seconds:>8.0%}" if known and ceilings else " " * 8
    aim = AIMS.get(row.name) if record.size == "full" else None
    yield f" {aim} {'met' if aim.met(row.value) else 'MISSED'}" if aim else " "
    yield row.note
