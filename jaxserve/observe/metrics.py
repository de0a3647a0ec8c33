"""What Prometheus scrapes. Names, labels and buckets are vLLM's after a prefix, so that dashboards fit.

The engine's thread adds to plain numbers; a scrape turns them into samples. Knows no engine and no server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.observe.histogram import (
    CHOICES,
    SECONDS_OF_A_REQUEST,
    SECONDS_PER_TOKEN,
    SECONDS_TO_FIRST_TOKEN,
    TOKENS_OF_A_STEP,
    Histogram,
    one_two_five,
)
from jaxserve.types import FinishReason, RequestStats, StepStats

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
REFUSALS = ("max_num_queued_reqs", "max_num_queued_tokens")
_LABELS = ("model_name", "engine")


@dataclass(slots=True)
class Totals:
    """Counters since the start."""

    prompt_computed: int = 0
    prompt_cached: int = 0
    generation: int = 0
    prefix_queries: int = 0
    preemptions: int = 0
    recompiles: int = 0
    recompile_seconds: float = 0.0
    ended: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    shaped: Counter[FinishReason] = field(default_factory=Counter[FinishReason])
    """Those of `ended` that asked for structured outputs."""
    refused: Counter[str] = field(default_factory=Counter[str])
    """Requests that found the queue full, by the limit. The server's thread counts these."""


class Metrics(Collector):
    """An observer of one engine, and a collector for one registry."""

    def __init__(self, model_name: str, prefix: str = "jaxserve") -> None:
        self._prefix = prefix
        self._labels = [model_name, "0"]
        self._totals = Totals()
        self._now: StepStats | None = None
        self._cache: dict[str, str] = {}
        self._by_step = {
            "iteration_tokens_total": Histogram(TOKENS_OF_A_STEP),
            "time_to_first_token_seconds": Histogram(SECONDS_TO_FIRST_TOKEN),
            "inter_token_latency_seconds": Histogram(SECONDS_PER_TOKEN),
        }
        self._by_request = _request_histograms(1_000_000)

    def settle(self, cache: Mapping[str, object], max_model_len: int) -> None:
        """What is known once the engine stands: its cache's settings, and how long a sequence can be."""
        self._cache = {name: str(value) for name, value in cache.items()}
        self._by_request = _request_histograms(max_model_len)

    def on_step(self, step: StepStats) -> None:
        self._now = step
        totals = self._totals
        totals.prompt_computed += step.prompt_tokens
        totals.prompt_cached += step.prefix_hits
        totals.generation += step.generation_tokens
        totals.prefix_queries += step.prefix_queries
        totals.preemptions += step.preemptions
        if step.prompt_tokens or step.generation_tokens:
            self._by_step["iteration_tokens_total"].observe(step.prompt_tokens + step.generation_tokens)
        self._by_step["time_to_first_token_seconds"].observe_all(step.first_token_seconds)
        self._by_step["inter_token_latency_seconds"].observe_all(step.inter_token_seconds)

    def on_finish(self, request: RequestStats) -> None:
        self._totals.ended[request.finish_reason] += 1
        self._totals.shaped[request.finish_reason] += request.shaped
        for name, value in _measures(request):
            self._by_request[name].observe(value)

    def on_recompile(self, seconds: float) -> None:
        self._totals.recompiles += 1
        self._totals.recompile_seconds += seconds

    def on_refusal(self, reason: str) -> None:
        """A request was refused because too much waited."""
        self._totals.refused[reason] += 1

    def registry(self) -> CollectorRegistry:
        """A registry of its own with these metrics and the process's."""
        found = CollectorRegistry()
        found.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=found)
        return found

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        for name, histogram in {**self._by_step, **self._by_request}.items():
            family = HistogramMetricFamily(f"{self._prefix}:{name}", _words(name), labels=_LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        now = self._now
        values = {
            "num_requests_running": now.running if now else 0,
            "num_requests_waiting": now.waiting if now else 0,
            "kv_cache_usage_perc": now.pages_used / now.pages_total if now and now.pages_total else 0.0,
            "kv_slots_unused_perc": now.slots_unused if now else 0.0,
        }
        for name, value in values.items():
            family = GaugeMetricFamily(f"{self._prefix}:{name}", _words(name), labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        labels = sorted(self._cache)
        info = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "cache config info", labels=("engine", *labels))
        info.add_metric([self._labels[1], *(self._cache[name] for name in labels)], 1)
        yield info

    def _counters(self) -> Iterator[Metric]:
        t = self._totals
        values = {
            "prompt_tokens": t.prompt_computed + t.prompt_cached,
            "prompt_tokens_cached": t.prompt_cached,
            "generation_tokens": t.generation,
            "prefix_cache_queries": t.prefix_queries,
            "prefix_cache_hits": t.prompt_cached,
            "num_preemptions": t.preemptions,
            "recompiles": t.recompiles,
            "recompile_seconds": t.recompile_seconds,
        }
        for name, value in values.items():
            family = CounterMetricFamily(f"{self._prefix}:{name}", _words(name), labels=_LABELS)
            family.add_metric(self._labels, value)
            yield family
        yield self._by_label(
            "prompt_tokens_by_source",
            "source",
            {"local_compute": t.prompt_computed, "local_cache_hit": t.prompt_cached},
        )
        yield self._by_label("request_success", "finished_reason", {reason: t.ended[reason] for reason in REASONS})
        shaped = {reason: t.shaped[reason] for reason in REASONS}
        yield self._by_label("structured_output_requests", "finished_reason", shaped)
        refused = {reason: t.refused[reason] for reason in REFUSALS}
        yield self._by_label("admission_rejections", "reason", refused)

    def _by_label(self, name: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", _words(name), labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric([*self._labels, key], value)
        return family


def _request_histograms(max_model_len: int) -> dict[str, Histogram]:
    tokens = one_two_five(max_model_len)
    return {
        "request_prompt_tokens": Histogram(tokens),
        "request_generation_tokens": Histogram(tokens),
        "request_params_max_tokens": Histogram(tokens),
        "request_params_n": Histogram(CHOICES),
        "e2e_request_latency_seconds": Histogram(SECONDS_OF_A_REQUEST),
        "request_queue_time_seconds": Histogram(SECONDS_OF_A_REQUEST),
        "request_prefill_time_seconds": Histogram(SECONDS_OF_A_REQUEST),
        "request_decode_time_seconds": Histogram(SECONDS_OF_A_REQUEST),
        "request_inference_time_seconds": Histogram(SECONDS_OF_A_REQUEST),
        "request_time_per_output_token_seconds": Histogram(SECONDS_PER_TOKEN),
    }


def _measures(request: RequestStats) -> Iterator[tuple[str, float]]:
    """What one finished request adds to which histogram. Times that never happened are left out."""
    times = request.times
    yield "request_prompt_tokens", request.prompt_tokens
    yield "request_generation_tokens", request.output_tokens
    yield "request_params_n", request.n
    if request.max_tokens is not None:
        yield "request_params_max_tokens", request.max_tokens
    yield "e2e_request_latency_seconds", request.finished - times.arrival
    if not times.first_scheduled:
        return
    yield "request_queue_time_seconds", times.first_scheduled - times.arrival
    if not times.first_token:
        return
    decode = times.last_token - times.first_token
    yield "request_prefill_time_seconds", times.first_token - times.first_scheduled
    yield "request_decode_time_seconds", decode
    yield "request_inference_time_seconds", times.last_token - times.first_scheduled
    steps = request.output_tokens // request.n - 1
    if steps > 0:
        yield "request_time_per_output_token_seconds", decode / steps


def _words(name: str) -> str:
    return name.replace("_", " ")
