"""The table and the JSON keys, which scripts read."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec

from server.bench.answers import Load, Sample
from server.bench.report import Setting, lines, record
from server.bench.summary import summarise
from tests.server.bench.timelines import answer, failure

SETTING = Setting(
    backend="openai", model="m", tokenizer="t", label=None, num_prompts=2, rate=4.0, burstiness=1.0, max_concurrency=8,
    ramp=None, goals={"ttft": 150.0}, metrics=("ttft", "itl"),
)  # fmt: skip
LOAD = Load((answer(5.0, 5.1, 5.3), failure(5.5, "status 503: queue is full")), 2.0)


def test_the_table():
    assert list(lines(SETTING, summarise(LOAD, (99.0, 99.9), SETTING.goals))) == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     1",
        "Failed requests:                         1",
        "Maximum request concurrency:             8",
        "Request rate configured (RPS):           4.00",
        "Benchmark duration (s):                  2.00",
        "Total input tokens:                      10",
        "Total generated tokens:                  2",
        "Request throughput (req/s):              0.50",
        "Request goodput (req/s):                 0.50",
        "Output token throughput (tok/s):         1.00",
        "Peak output token throughput (tok/s):    2.00",
        "Peak concurrent requests:                1",
        "Total token throughput (tok/s):          6.00",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          100.00",
        "Median TTFT (ms):                        100.00",
        "P99 TTFT (ms):                           100.00",
        "P99.9 TTFT (ms):                         100.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           200.00",
        "Median ITL (ms):                         200.00",
        "P99 ITL (ms):                            200.00",
        "P99.9 ITL (ms):                          200.00",
        "---------------------Failures---------------------",
        "1 x status 503: queue is full",
        "=" * 50,
    ]


def test_keys_of_the_record():
    found = record(SETTING, summarise(LOAD, (99.0, 99.9), SETTING.goals), "20300101-000000", {"machine": "small"})
    assert (
        list(found)
        == (
            "date backend endpoint_type label model_id tokenizer_id num_prompts machine request_rate burstiness "
            "max_concurrency duration completed failed failures total_input_tokens total_output_tokens "
            "request_throughput request_goodput goodput_slos output_throughput total_token_throughput "
            "max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms "
            "p99.9_ttft_ms mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms p99.9_itl_ms"
        ).split()
    )
    assert json.loads(msgspec.json.encode(found))["failures"] == {"status 503: queue is full": 1}


def test_a_rate_without_end_is_a_word_and_a_ramp_is_told():
    summary = summarise(LOAD)
    open_ended = replace(SETTING, rate=math.inf, ramp=("linear", 1.0, 9.0), max_concurrency=None)
    found = record(open_ended, summary, "d", {})
    assert (found["request_rate"], found["ramp_up_strategy"], found["ramp_up_end_rps"]) == ("inf", "linear", 9.0)
    assert not any(line.startswith(("Request rate", "Maximum")) for line in lines(open_ended, summary))


def test_details_are_in_the_order_of_the_samples():
    samples = (Sample("a", 9, 3), Sample("b", 8, 3))
    found = record(SETTING, summarise(LOAD), "d", {}, (LOAD, samples))
    details = {name: found[name] for name in ("input_lens", "output_lens", "start_times", "generated_texts", "errors")}
    assert details == {
        "input_lens": [10, 8],
        "output_lens": [2, 0],
        "start_times": [0.0, 0.5],
        "generated_texts": ["xx", ""],
        "errors": ["", "status 503: queue is full"],
    }
