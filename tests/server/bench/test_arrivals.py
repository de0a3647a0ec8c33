"""When requests come: mean rates, bursts, ramps, and the limit on how many run."""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics

import pytest

from server.bench.answers import Answer, Sample
from server.bench.arrivals import Ramp, offsets, run_load

SAMPLE = Sample("a", 1, 1)


def gaps(times: list[float]) -> list[float]:
    return [new - old for old, new in itertools.pairwise([0.0, *times])]


def test_without_a_rate_all_come_at_once():
    assert offsets(3, math.inf, 1.0, seed=0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 8.0])
def test_the_mean_rate_is_the_one_asked_for(rate: float, burstiness: float):
    times = offsets(2000, rate, burstiness, seed=1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(2000 / rate)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 16.0])
def test_gaps_vary_as_the_burstiness_says(burstiness: float):
    """A gamma distribution with this shape has a standard deviation of mean / sqrt(shape)."""
    found = gaps(offsets(20_000, 10.0, burstiness, seed=2))
    assert statistics.fmean(found) == pytest.approx(0.1)
    assert statistics.pstdev(found) * 10 == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_the_seed_decides():
    assert offsets(50, 3.0, 1.0, seed=7) == offsets(50, 3.0, 1.0, seed=7)
    assert offsets(50, 3.0, 1.0, seed=7) != offsets(50, 3.0, 1.0, seed=8)


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 50.5), ("exponential", 10.0)])
def test_a_ramp_goes_from_its_start_to_its_end(strategy, middle: float):
    ramp = Ramp(strategy, 1.0, 100.0)
    assert [ramp.rate(share) for share in (0, 0.5, 1)] == [pytest.approx(v) for v in (1.0, middle, 100.0)]
    found = gaps(offsets(4000, math.inf, 1.0, seed=3, ramp=ramp))
    assert statistics.fmean(found[:40]) > 5 * statistics.fmean(found[-400:])


def test_answers_come_in_the_order_of_samples_and_no_more_run_than_allowed():
    running: list[int] = []
    most = 0

    async def ask(sample: Sample) -> Answer:
        nonlocal most
        running.append(sample.prompt_tokens)
        most = max(most, len(running))
        await asyncio.sleep(0.001 * (5 - sample.prompt_tokens))
        running.remove(sample.prompt_tokens)
        return Answer(0.0, 1.0, text=str(sample.prompt_tokens))

    done: list[None] = []
    samples = [Sample("a", i, 1) for i in range(5)]
    load = asyncio.run(run_load(ask, samples, [0.0] * 5, 2, lambda: done.append(None)))
    assert [answer.text for answer in load.answers] == ["0", "1", "2", "3", "4"]
    assert (most, len(done)) == (2, 5)


def test_a_request_is_not_early():
    starts: list[float] = []

    async def ask(_sample: Sample) -> Answer:
        starts.append(asyncio.get_running_loop().time())
        return Answer(0.0, 0.0)

    load = asyncio.run(run_load(ask, [SAMPLE] * 3, [0.0, 0.03, 0.06], None))
    assert starts[1] - starts[0] > 0.025 and starts[2] - starts[0] > 0.055
    assert load.seconds >= 0.055
