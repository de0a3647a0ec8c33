"""From answers to numbers: throughput, the four latencies and their percentiles, goodput.

Seconds go in, milliseconds come out, as vLLM tells them. Arithmetic only.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.bench.answers import Answer, Load

METRICS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
GOALS = ("ttft", "tpot", "e2el")
"""What a service level can be asked of."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one latency, in milliseconds; zeros where nothing was measured."""

    mean: float
    median: float
    std: float
    percentiles: tuple[tuple[float, float], ...]
    """Which one, and its value."""

    @staticmethod
    def of(seconds: Sequence[float], percentiles: Sequence[float]) -> Spread:
        values = sorted(1000 * value for value in seconds) or [0.0]
        return Spread(
            statistics.fmean(values),
            statistics.median(values),
            statistics.pstdev(values),
            tuple((p, percentile(values, p)) for p in percentiles),
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers; rates are for each second of it."""

    duration: float
    completed: int
    failures: tuple[tuple[str, int], ...]
    """What went wrong and how often, most frequent first."""
    input_tokens: int
    output_tokens: int
    request_throughput: float
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    peak_output_throughput: float
    """Of the best whole second."""
    peak_concurrency: int
    spreads: Mapping[str, Spread]

    @property
    def failed(self) -> int:
        return sum(count for _, count in self.failures)


def percentile(ordered: Sequence[float], share: float) -> float:
    """`share` in 0..100, between two neighbours in proportion."""
    at = (len(ordered) - 1) * share / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def summarise(load: Load, percentiles: Sequence[float] = (99.0,), goals: Mapping[str, float] | None = None) -> Summary:
    """`goals`: milliseconds that an answer may take to be good, by names of `GOALS`."""
    good = [answer for answer in load.answers if not answer.error]
    failures = Counter(answer.error for answer in load.answers if answer.error)
    seconds = max(load.seconds, 1e-9)
    inputs = sum(answer.prompt_tokens for answer in good)
    outputs = sum(answer.output_tokens for answer in good)
    return Summary(
        duration=load.seconds,
        completed=len(good),
        failures=tuple(failures.most_common()),
        input_tokens=inputs,
        output_tokens=outputs,
        request_throughput=len(good) / seconds,
        request_goodput=sum(_meets(answer, goals) for answer in good) / seconds if goals else None,
        output_throughput=outputs / seconds,
        total_token_throughput=(inputs + outputs) / seconds,
        peak_output_throughput=_peak_output(good),
        peak_concurrency=_peak_concurrency(good),
        spreads={name: Spread.of([v for a in good for v in values_of(a, name)], percentiles) for name in METRICS},
    )


def values_of(answer: Answer, metric: str) -> Sequence[float]:
    """What an answer adds to a metric, in seconds."""
    match metric:
        case "ttft":
            return (answer.ttft,)
        case "tpot":
            return () if answer.tpot is None else (answer.tpot,)
        case "itl":
            return answer.gaps
        case _:
            return (answer.latency,)


def _meets(answer: Answer, goals: Mapping[str, float]) -> bool:
    return all(1000 * value <= goals[name] for name in goals for value in values_of(answer, name))


def _peak_output(answers: Sequence[Answer]) -> float:
    """Seconds are counted from the first request; an answer's tokens are spread evenly over its events."""
    begin = min((answer.start for answer in answers), default=0.0)
    counted: dict[int, float] = {}
    for answer in answers:
        share = answer.output_tokens / len(answer.arrivals)
        for at in answer.arrivals:
            counted[int(at - begin)] = counted.get(int(at - begin), 0.0) + share
    return max(counted.values(), default=0.0)


def _peak_concurrency(answers: Sequence[Answer]) -> int:
    running = most = 0
    for _, change in sorted(_changes(answers)):
        running += change
        most = max(most, running)
    return most


def _changes(answers: Sequence[Answer]) -> Iterator[tuple[float, int]]:
    """Ends sort before starts of the same moment."""
    for answer in answers:
        yield answer.start, 1
        yield answer.end, -1
