"""Metrics as a scrape sees them."""

from __future__ import annotations

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.observe.histogram import Histogram, one_two_five
from jaxserve.observe.log_line import LogLine
from jaxserve.observe.metrics import Metrics
from jaxserve.types import RequestStats, RequestTimes, StepStats


def step(**changes: object) -> StepStats:
    base: dict[str, object] = dict(  # noqa: C408 - reads like the call
        running=2, waiting=1, pages_used=30, pages_total=120, slots_unused=0.25, prompt_tokens=10, generation_tokens=2,
        prefix_queries=20, prefix_hits=16, preemptions=1, first_token_seconds=(0.03,), inter_token_seconds=(0.01, 0.2),
    )  # fmt: skip
    return StepStats(**(base | changes))  # type: ignore[arg-type]


def finished(**changes: object) -> RequestStats:
    base: dict[str, object] = dict(  # noqa: C408 - reads like the call
        times=RequestTimes(arrival=10.0, first_scheduled=11.0, first_token=12.0, last_token=16.0), finished=16.5,
        prompt_tokens=26, cached_tokens=16, output_tokens=5, finish_reason="stop", n=1, max_tokens=20, shaped=False,
    )  # fmt: skip
    return RequestStats(**(base | changes))  # type: ignore[arg-type]


def scrape(metrics: Metrics) -> dict[str, float]:
    """Samples by name and extra label."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry()).decode()):
        for sample in family.samples:
            extra = [v for k, v in sample.labels.items() if k not in ("model_name", "engine")]
            if "model_name" in sample.labels:
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("toy", "0")
            found[" ".join([sample.name, *extra])] = sample.value
    return found


def test_counters_and_gauges_add_up_over_steps() -> None:
    metrics = Metrics("toy")
    metrics.on_step(step())
    metrics.on_step(step(running=3, waiting=0))
    metrics.on_recompile(1.5)
    found = scrape(metrics)
    assert found["jaxserve:num_requests_running"] == 3
    assert found["jaxserve:num_requests_waiting"] == 0
    assert found["jaxserve:kv_cache_usage_perc"] == 0.25
    assert found["jaxserve:kv_slots_unused_perc"] == 0.25
    assert found["jaxserve:prompt_tokens_total"] == 2 * (10 + 16)
    assert found["jaxserve:prompt_tokens_cached_total"] == 32
    assert found["jaxserve:prompt_tokens_by_source_total local_compute"] == 20
    assert found["jaxserve:generation_tokens_total"] == 4
    assert found["jaxserve:prefix_cache_queries_total"] == 40
    assert found["jaxserve:prefix_cache_hits_total"] == 32
    assert found["jaxserve:num_preemptions_total"] == 2
    assert found["jaxserve:recompiles_total"] == 1
    assert found["jaxserve:iteration_tokens_total_bucket 8.0"] == 0
    assert found["jaxserve:iteration_tokens_total_bucket 16.0"] == 2
    assert found["jaxserve:inter_token_latency_seconds_count"] == 4
    assert found["jaxserve:inter_token_latency_seconds_bucket 0.01"] == 2
    assert found["jaxserve:time_to_first_token_seconds_sum"] == 0.06


def test_structured_outputs_are_counted_apart() -> None:
    metrics = Metrics("toy")
    metrics.on_finish(finished())
    metrics.on_finish(finished(finish_reason="length", shaped=True))
    found = scrape(metrics)
    assert found["jaxserve:structured_output_requests_total length"] == 1
    assert found["jaxserve:structured_output_requests_total stop"] == 0


def test_a_request_adds_to_its_histograms_once() -> None:
    metrics = Metrics("toy", "vllm")
    metrics.settle({"block_size": 16, "num_gpu_blocks": 120}, max_model_len=64)
    metrics.on_finish(finished())
    metrics.on_finish(finished(finish_reason="abort", times=RequestTimes(arrival=10.0), output_tokens=0))
    found = scrape(metrics)
    assert found["vllm:request_success_total stop"] == 1
    assert found["vllm:request_success_total abort"] == 1
    assert found["vllm:request_success_total length"] == 0
    assert found["vllm:request_prompt_tokens_bucket 50.0"] == 2
    assert "vllm:request_prompt_tokens_bucket 100.0" not in found
    assert found["vllm:e2e_request_latency_seconds_sum"] == 13.0
    assert found["vllm:request_queue_time_seconds_sum"] == 1.0
    assert found["vllm:request_prefill_time_seconds_sum"] == 1.0
    assert found["vllm:request_decode_time_seconds_sum"] == 4.0
    assert found["vllm:request_inference_time_seconds_sum"] == 5.0
    assert found["vllm:request_time_per_output_token_seconds_sum"] == 1.0
    assert found["vllm:cache_config_info 16 120"] == 1


def test_every_family_is_there_before_anything_happened() -> None:
    found = scrape(Metrics("toy"))
    assert found["jaxserve:num_requests_running"] == 0
    assert found["jaxserve:generation_tokens_total"] == 0
    assert found["jaxserve:e2e_request_latency_seconds_count"] == 0


def test_bounds_belong_to_their_bucket() -> None:
    histogram = Histogram((1, 2))
    histogram.observe_all((1, 1.5, 2, 3))
    assert histogram.buckets() == [("1.0", 1), ("2.0", 3), ("+Inf", 4)]
    assert one_two_five(100) == (1, 2, 5, 10, 20, 50, 100)


def test_the_log_line_tells_of_its_seconds_only_and_then_keeps_quiet() -> None:
    line = LogLine()
    assert line.take(10) is None
    line.on_step(step())
    assert line.take(10) == (
        "prompt 2.6 tokens/s, generation 0.2 tokens/s, running 2, waiting 1, KV use 25.0%, prefix hits 80.0%"
    )
    idle = step(running=0, waiting=0, prompt_tokens=0, generation_tokens=0, prefix_hits=0, prefix_queries=0)
    line.on_step(idle)
    assert line.take(10) == (
        "prompt 0.0 tokens/s, generation 0.0 tokens/s, running 0, waiting 0, KV use 25.0%, prefix hits none asked"
    )
    assert line.take(10) is None
