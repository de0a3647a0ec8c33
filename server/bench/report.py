"""What a run is told as: the table on the terminal, and a JSON object with vLLM's keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from server.bench.answers import Load, Sample
from server.bench.summary import METRICS, Summary

WIDTH = 50


@dataclass(frozen=True, slots=True)
class Setting:
    """How the load was made."""

    backend: str
    model: str
    tokenizer: str
    label: str | None
    num_prompts: int
    rate: float
    burstiness: float
    max_concurrency: int | None
    ramp: tuple[str, float, float] | None
    goals: Mapping[str, float]
    metrics: Sequence[str]
    """Whose latencies are told."""


def lines(setting: Setting, summary: Summary) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{WIDTH}}"
    yield _row("Successful requests:", summary.completed)
    yield _row("Failed requests:", summary.failed)
    if setting.max_concurrency is not None:
        yield _row("Maximum request concurrency:", setting.max_concurrency)
    if not math.isinf(setting.rate):
        yield _row("Request rate configured (RPS):", setting.rate)
    yield _row("Benchmark duration (s):", summary.duration)
    yield _row("Total input tokens:", summary.input_tokens)
    yield _row("Total generated tokens:", summary.output_tokens)
    yield _row("Request throughput (req/s):", summary.request_throughput)
    if summary.request_goodput is not None:
        yield _row("Request goodput (req/s):", summary.request_goodput)
    yield _row("Output token throughput (tok/s):", summary.output_throughput)
    yield _row("Peak output token throughput (tok/s):", summary.peak_output_throughput)
    yield _row("Peak concurrent requests:", summary.peak_concurrency)
    yield _row("Total token throughput (tok/s):", summary.total_token_throughput)
    for name in setting.metrics:
        spread, short = summary.spreads[name], name.upper()
        yield f"{METRICS[name]:-^{WIDTH}}"
        yield _row(f"Mean {short} (ms):", spread.mean)
        yield _row(f"Median {short} (ms):", spread.median)
        for p, value in spread.percentiles:
            yield _row(f"P{p:g} {short} (ms):", value)
    if summary.failures:
        yield f"{'Failures':-^{WIDTH}}"
        yield from (f"{count} x {error}" for error, count in summary.failures)
    yield "=" * WIDTH


def record(
    setting: Setting,
    summary: Summary,
    date: str,
    metadata: Mapping[str, str],
    detail: tuple[Load, Sequence[Sample]] | None = None,
) -> dict[str, object]:
    """With `detail`, each request's numbers too."""
    found: dict[str, object] = {
        "date": date,
        "backend": setting.backend,
        "endpoint_type": setting.backend,
        "label": setting.label,
        "model_id": setting.model,
        "tokenizer_id": setting.tokenizer,
        "num_prompts": setting.num_prompts,
        **metadata,
        "request_rate": "inf" if math.isinf(setting.rate) else setting.rate,
        "burstiness": setting.burstiness,
        "max_concurrency": setting.max_concurrency,
    }
    if setting.ramp is not None:
        found |= zip(("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"), setting.ramp, strict=True)
    found |= {
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "failures": dict(summary.failures),
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.request_goodput,
        "goodput_slos": dict(setting.goals),
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_token_throughput,
        "max_output_tokens_per_s": summary.peak_output_throughput,
        "max_concurrent_requests": summary.peak_concurrency,
    }
    for name in setting.metrics:
        spread = summary.spreads[name]
        found |= {f"mean_{name}_ms": spread.mean, f"median_{name}_ms": spread.median, f"std_{name}_ms": spread.std}
        found |= {f"p{p:g}_{name}_ms": value for p, value in spread.percentiles}
    if detail is not None:
        found |= _details(*detail)
    return found


def _details(load: Load, samples: Sequence[Sample]) -> dict[str, object]:
    """In the order of the samples; what failed has zeros."""
    begin = min((answer.start for answer in load.answers), default=0.0)
    good = [None if answer.error else answer for answer in load.answers]
    return {
        "input_lens": [a.prompt_tokens if a else s.prompt_tokens for a, s in zip(good, samples, strict=True)],
        "output_lens": [answer.output_tokens if answer else 0 for answer in good],
        "start_times": [answer.start - begin for answer in load.answers],
        "ttfts": [answer.ttft if answer else 0.0 for answer in good],
        "itls": [answer.gaps if answer else [] for answer in good],
        "generated_texts": [answer.text if answer else "" for answer in good],
        "errors": [answer.error for answer in load.answers],
    }


def _row(name: str, value: float) -> str:
    shown = f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{name:<40} {shown:<10}".rstrip()
