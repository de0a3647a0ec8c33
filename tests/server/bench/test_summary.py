"""Numbers of timelines that are made by hand."""

from __future__ import annotations

import pytest

from server.bench.answers import Load
from server.bench.summary import Spread, percentile, summarise
from tests.server.bench.timelines import answer, failure

LOAD = Load(
    answers=(
        answer(100.0, 100.1, 100.3, 100.5, prompt=10),  # ttft 100 ms, two gaps of 200 ms
        failure(100.0, "status 500: broken"),
        answer(100.2, 100.5, 101.5, prompt=20, output=6),  # ttft 300 ms, one gap of a second with five tokens in it
        answer(101.5, 101.7, prompt=30),  # one token
        failure(100.1, "status 500: broken"),
        failure(100.1, "the stream ended before the answer did"),
    ),
    seconds=2.0,
)


def test_throughput_is_what_the_server_counted():
    found = summarise(LOAD)
    assert (found.completed, found.failed) == (3, 3)
    assert found.failures == (("status 500: broken", 2), ("the stream ended before the answer did", 1))
    assert (found.input_tokens, found.output_tokens) == (60, 10)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (1.5, 5.0, 35.0)


def test_latencies_are_exact():
    spreads = summarise(LOAD, (50.0, 100.0)).spreads
    means = {"ttft": 200.0, "tpot": 200.0, "itl": 1400 / 3, "e2el": (500 + 1300 + 200) / 3}
    assert {name: spread.mean for name, spread in spreads.items()} == pytest.approx(means)
    medians = {"ttft": 200.0, "tpot": 200.0, "itl": 200.0, "e2el": 500.0}
    assert {name: spread.median for name, spread in spreads.items()} == pytest.approx(medians)
    tops = {"ttft": 300.0, "tpot": 200.0, "itl": 1000.0, "e2el": 1300.0}
    assert {name: dict(spread.percentiles)[100.0] for name, spread in spreads.items()} == pytest.approx(tops)


def test_an_answer_ends_with_its_last_event_even_without_text():
    found = answer(0.0, 0.5, 1.0, output=3, end=1.5)
    assert (found.latency, found.tpot) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 250}, 2),
        ({"ttft": 300.1, "tpot": 199}, 1),  # an answer of one token has no time per token that could be too long
        ({"e2el": 1000, "ttft": 150}, 1),
        ({"e2el": 1}, 0),
    ],
)
def test_goodput_counts_answers_that_meet_every_goal(goals: dict[str, float], good: int):
    assert summarise(LOAD, goals=goals).request_goodput == good / 2


def test_no_goal_no_goodput():
    assert summarise(LOAD).request_goodput is None


def test_peaks():
    """From 100.0 on: 3 tokens and a half of 6 in the first second, half of 6 and 1 in the second."""
    found = summarise(LOAD)
    assert found.peak_output_throughput == 6.0
    assert found.peak_concurrency == 2
    touching = Load((answer(0.0, 1.0), answer(1.0, 2.0)), 2.0)
    assert summarise(touching).peak_concurrency == 1


def test_percentiles_lie_between_neighbours():
    assert [percentile([0.0, 10.0, 20.0], p) for p in (0, 25, 50, 99, 100)] == pytest.approx([0, 5, 10, 19.8, 20])
    assert percentile([7.0], 99) == 7.0
    assert Spread.of([0.001, 0.003], (99,)).std == pytest.approx(1.0)


def test_nothing_answered_is_all_zeros():
    found = summarise(Load((failure(0.0, "no"),), 0.0))
    assert (found.completed, found.request_throughput, found.peak_output_throughput) == (0, 0.0, 0.0)
    assert found.spreads["ttft"] == Spread(0.0, 0.0, 0.0, ((99.0, 0.0),))
