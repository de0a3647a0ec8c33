"""From records to the page: medians, ratios, tables, and their place in a document."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.peers.cases import Case
from benchmarks.peers.engines import OURS, Engine

BEGIN, END = "<!-- benchmarks/compare.py: begin -->", "<!-- benchmarks/compare.py: end -->"


@dataclass(frozen=True)
class Record:
    """One engine on one case in one turn."""

    case: str
    engine: str
    run: int
    version: str
    date: str
    requests: int
    measured: Mapping[str, float]
    first: list[int] = field(default_factory=list[int])
    """The first token of each answer, where the engine tells them."""


def read(path: Path) -> list[Record]:
    """All records of a file; none where it does not exist."""
    if not path.exists():
        return []
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()]


def append(path: Path, record: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        print(json.dumps(asdict(record)), file=file)


@dataclass(frozen=True)
class Median:
    """All turns of one engine on one case."""

    engine: str
    requests: int
    runs: int
    values: Mapping[str, float]
    """Median of each number, and of what is made of them: `rate` in output tokens a second, `by_cpu` a CPU second,
    `alike`, the share of answers that begin with the token that jaxserve's begin with."""


def medians(records: Sequence[Record], case: str) -> list[Median]:
    """In the order in which the engines came first."""
    engines = dict.fromkeys(record.engine for record in records if record.case == case)
    found: list[Median] = []
    for engine in engines:
        runs = [record for record in records if (record.case, record.engine) == (case, engine)]
        made = [{**_made(record.measured), **_alike(record, records)} for record in runs]
        values = {name: statistics.median(one[name] for one in made if name in one) for one in made for name in one}
        found.append(Median(engine, runs[0].requests, len(runs), values))
    return found


def _made(measured: Mapping[str, float]) -> dict[str, float]:
    made = dict(measured)
    if "tokens" in made:
        made.setdefault("rate", made["tokens"] / made["seconds"])
        made["by_cpu"] = made["tokens"] / made["cpu"]
    return made


def _alike(record: Record, records: Sequence[Record]) -> dict[str, float]:
    """Empty where either has told no tokens of this case in this turn, or of one request, which shares nothing out."""
    ours = next((r.first for r in records if (r.case, r.engine, r.run) == (record.case, OURS, record.run)), [])
    pairs = list(zip(record.first, ours, strict=False))  # some engines answer only the first requests
    return {"alike": statistics.mean(a == b for a, b in pairs)} if len(pairs) > 1 else {}


def section(
    cases: Sequence[Case],
    engines: Sequence[Engine],
    records: Sequence[Record],
    floors: Mapping[str, float],
    told: Sequence[str],
) -> str:
    """The whole section of the document. `floors`: output tokens a second, by case. `told`: paragraphs before it."""
    parts = ["\n\n".join(told)]
    for case in cases:
        found = medians(records, case.name)
        if found:
            rows = {"offline": _offline, "http": _http, "start": _start}[case.kind]
            parts.append(f"`{case.name}`: {case.told}. Medians of {_runs(found)}.{_absent(case, engines)}")
            parts.append("\n".join(rows(case, found, floors)))
    return "\n\n".join(parts)


def _absent(case: Case, engines: Sequence[Engine]) -> str:
    """Who is not in the table, and why."""
    barred = [f"{engine.name} ({why})" for engine in engines if (why := engine.barred(case))]
    return f" Not in it: {'; '.join(barred)}." if barred else ""


def place(document: str, section: str) -> str:
    """The document with this section between its markers; at its end, where it has none yet."""
    marked = f"{BEGIN}\n\n{section}\n\n{END}\n"
    before, begin, rest = document.partition(f"{BEGIN}\n")
    if not begin:
        return f"{document.rstrip()}\n\n## Beside other engines\n\n{marked}"
    _, end, after = rest.partition(f"{END}\n")
    if not end:
        raise ValueError(f"the document has {BEGIN!r} and no line {END!r} after it; add one")
    return f"{before}{marked}{after}"


def _offline(case: Case, found: Sequence[Median], floors: Mapping[str, float]) -> Iterator[str]:
    floor = floors.get(case.name)
    numbers = ("tokens/s", "of the floor", "CPU-s", "s a request", "prompt tokens computed", "same first token")
    yield from _head("engine", *numbers, *_RATIOS)
    for one in found:
        v = one.values
        yield _row(
            _name(one, found),
            f"{v['rate']:.1f}",
            f"{v['rate'] / floor:.0%}" if floor else "",
            f"{v['cpu']:.1f}",
            f"{v['seconds'] / one.requests:.2f}",
            f"{v['computed']:.0f}" if "computed" in v else "",
            f"{v['alike']:.0%}" if "alike" in v and one.engine != OURS else "",
            *_ratios(one, found, "rate", "by_cpu"),
        )


def _http(case: Case, found: Sequence[Median], floors: Mapping[str, float]) -> Iterator[str]:
    yield from _head("engine", "tokens/s", "CPU-s", "TTFT p50, ms", "p95", "ITL p50, ms", "p95", *_RATIOS)
    for one in found:
        v = one.values
        latencies = (f"{v[name]:.0f}" for name in ("ttft_p50", "ttft_p95", "itl_p50", "itl_p95"))
        yield _row(
            _name(one, found), f"{v['rate']:.1f}", f"{v['cpu']:.1f}", *latencies, *_ratios(one, found, "rate", "by_cpu")
        )


def _start(case: Case, found: Sequence[Median], floors: Mapping[str, float]) -> Iterator[str]:
    yield from _head("engine", "nothing compiled yet, s", "compiled before, s", "jaxserve is faster by")
    for one in found:
        cold = f"{one.values['cold']:.1f}" if "cold" in one.values else "compiles nothing"
        yield _row(_name(one, found), cold, f"{one.values['warm']:.1f}", *_inverse(one, found))


_RATIOS = ("jaxserve is faster by", "by CPU time")


def _ratios(one: Median, found: Sequence[Median], *names: str) -> list[str]:
    """How many times as much of these jaxserve has."""
    ours = next((median for median in found if median.engine == OURS), None)
    if ours is None or one is ours:
        return [""] * len(names)
    return [f"{ours.values[name] / one.values[name]:.2f}" for name in names]


def _inverse(one: Median, found: Sequence[Median]) -> list[str]:
    ours = next((median for median in found if median.engine == OURS), None)
    return ["" if ours is None or one is ours else f"{one.values['warm'] / ours.values['warm']:.2f}"]


def _name(one: Median, found: Sequence[Median]) -> str:
    whole = max(median.requests for median in found)
    return one.engine if one.requests == whole else f"{one.engine} (first {one.requests})"


def _runs(found: Sequence[Median]) -> str:
    counts = sorted({one.runs for one in found})
    return " to ".join(map(str, counts)) + " turns" if counts[-1] > 1 else "one turn"


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield _row(*["---"] * len(names))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"
