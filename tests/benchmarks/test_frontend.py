"""The bench of the front door, made small: every ring says all tokens, and a server tells its costs."""

from __future__ import annotations

import pytest

from benchmarks.frontend import PATHS, Cost, Device, Load, app_alone, engine_alone, over_http, streams_alone
from jaxserve.config import DEMO_MODEL
from jaxserve.plan import StepPlan

LOAD = Load(streams=4, tokens=40, step=0.002)


def test_the_device_says_a_text_and_takes_its_time() -> None:
    device = Device((5, 6, 7), seconds=0.0)
    said = [device.launch(StepPlan(n, (), (), (), 2, 2)).read().tokens.tolist() for n in range(4)]
    assert said == [[5, 5], [6, 6], [7, 7], [5, 5]]
    slow = Device((5,), seconds=0.01)
    first, second = (slow.launch(StepPlan(n, (), (), (), 1, 1)) for n in range(2))
    assert second.done - first.done == pytest.approx(0.01)


def test_the_engine_costs_more_than_its_parts() -> None:
    plan, commit, engine = engine_alone(DEMO_MODEL, LOAD)
    assert plan.micros + commit.micros < engine.micros
    assert engine.pieces == LOAD.all_tokens


@pytest.mark.parametrize("ring", [streams_alone, lambda *given: app_alone(*given, "chat")], ids=["streams", "app"])
def test_every_ring_is_measured(ring) -> None:
    cost: Cost = ring(DEMO_MODEL, LOAD)
    assert cost.micros > 0
    assert LOAD.streams < cost.pieces < 2 * LOAD.all_tokens


@pytest.mark.parametrize("path", PATHS)
def test_a_server_is_measured_from_other_processes(path: str) -> None:
    found = over_http(DEMO_MODEL, path, LOAD)
    assert LOAD.streams < found.events < 2 * LOAD.all_tokens
    assert min(found.engine, found.loop, found.client, found.seconds) > 0
    assert found.lags and found.frozen > 10_000
    assert found.row().startswith(path)
