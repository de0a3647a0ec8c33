"""Every family through the device half against transformers' recorded logits: whole, in chunks, token by token.

Plans are made by hand here, so that a sequence can be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from jaxserve.device.executor import Executor
from jaxserve.launching import Launched
from jaxserve.plan import Admission, Chunk, PageEntry, StepPlan
from jaxserve.types import SamplingParams
from tests.device.engines import start
from tests.models.cases import CASES, Case, Recorded


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def model(request: pytest.FixtureRequest) -> Iterator[tuple[Case, Launched]]:
    launched = start(request.param.name)
    yield request.param, launched
    launched.engine.close()


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def walk(executor: Executor, recorded: Recorded, cuts: Sequence[int], row: int = 1) -> np.ndarray:
    """Logprob of each token after the one before, the sequence entering in chunks of `cuts` tokens. f64[L - 1]"""
    ids, shapes = recorded.ids.tolist(), executor.shapes
    page, groups = shapes.step.page, len(shapes.kv)
    found: list[float] = []
    start_at = 0
    for number, count in enumerate(cuts):
        first, last = -(-start_at // page), -(-(start_at + count) // page)
        admission = Admission(0, row, recorded.prompt_len, (), ((),) * groups, SamplingParams(), (), (), seed=0)
        targets = ids[start_at + 1 : start_at + count + 1]
        chunk = Chunk(0, 0, row, start_at, count, emit=False, ids=ids[start_at : start_at + count], targets=targets)
        plan = StepPlan(
            number=number,
            chunks=(chunk,),
            admissions=() if number else (admission,),
            pages=tuple(PageEntry(g, row, i, 3 + 2 * i) for g in range(groups) for i in range(first, last)),
            tokens=count,
            emitting=0,
        )
        flight = executor.launch(plan)
        flight.sample()
        scores = flight.read().prompt_scores
        found += scores[0].logprob.tolist() if targets else []
        start_at += count
    return np.array(found)


def cut(length: int, size: int) -> list[int]:
    return [min(size, length - at) for at in range(0, length, size)]


@pytest.mark.parametrize("size", [64, 7, 1], ids=["whole", "chunks", "tokens"])
def test_logprobs_equal_transformers(model: tuple[Case, Launched], size: int) -> None:
    case, launched = model
    for recorded in case.recorded():
        ids = recorded.ids
        want = logprobs(recorded.logits)[np.arange(len(ids) - 1), ids[1:]]
        np.testing.assert_allclose(walk(launched.executor, recorded, cut(len(ids), size)), want, atol=1e-3)


def test_a_wrong_cut_would_show(model: tuple[Case, Launched]) -> None:
    """The comparison is not blind: another sequence's logits do not pass for these."""
    case, launched = model
    recorded = case.recorded()[1]
    ids = recorded.ids
    want = logprobs(recorded.logits)[np.arange(len(ids) - 1), ids[1:]]
    other = Recorded(np.roll(ids, 1), recorded.prompt_len, recorded.logits)
    assert np.abs(walk(launched.executor, other, [len(ids)]) - want).max() > 1e-2
