"""Engines with int8 weights: near the float model's answers, and whatever else happens to a request, the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.launching import Launched
from tests.device.engines import Tight, engine, request, run, start, tokens
from tests.device.test_executor import TIGHT_PAGES, ask
from tests.device.test_reference import cut, logprobs, walk
from tests.models.cases import Case


@pytest.fixture(scope="module", params=["plain", "deterministic"])
def llama(request: pytest.FixtureRequest) -> Iterator[Launched]:
    launched = start("llama3", quantization="int8", deterministic=request.param == "deterministic")
    yield launched
    launched.engine.close()


@pytest.mark.parametrize("size", [64, 7])
def test_logprobs_are_near_those_of_transformers(llama: Launched, size: int) -> None:
    """As near as 32 channels allow; of unrelated logits they would be off by more than 1."""
    for recorded in Case("llama3").recorded():
        ids = recorded.ids
        want = logprobs(recorded.logits)[np.arange(len(ids) - 1), ids[1:]]
        off = np.abs(walk(llama.executor, recorded, cut(len(ids), size)) - want)
        assert 1e-3 < off.mean() < 0.15


@pytest.mark.parametrize(
    "tight",
    [Tight(depth=1), Tight(tokens=5), Tight(rows=1), Tight(caching=False), Tight(pages=TIGHT_PAGES, tokens=6, depth=3)],
    ids=["depth 1", "chunks", "one row", "no cache", "preempted"],
)
def test_nothing_changes_the_answer(llama: Launched, tight: Tight) -> None:
    want = tokens(run(engine(llama), ask()))
    assert tokens(run(engine(llama, tight), ask())) == want


def test_alone_and_among_others_bit_for_bit(llama: Launched) -> None:
    if not llama.config.deterministic:
        pytest.skip("only deterministic mode promises it")
    mine = request("mine", list(range(1, 20)), logprobs=2)
    alone = run(engine(llama), [mine])["mine"]
    assert run(engine(llama), [*ask(temperature=1.2), mine])["mine"].outputs == alone.outputs


def test_the_model_and_params_are_the_engines_own(llama: Launched) -> None:
    held = jax.tree.leaves(llama.model)
    assert {id(a) for a in llama.executor.leaves} == {id(a) for a in held}
    assert {str(a.dtype) for a in held} == {"int8", "float32"}
    assert tuple(a.shape for a in held) == tuple(a.shape for a in llama.executor.shapes.leaves)


def test_devices_share_the_weights_and_give_the_same_answer(eight_heads: Path) -> None:
    one = start(eight_heads, quantization="int8")
    want = run(engine(one), ask(logprobs=1))
    one.engine.close()
    shared = start(eight_heads, quantization="int8", tensor_parallel_size=2)
    got = run(engine(shared), ask(logprobs=1))
    split = [a for a in shared.executor.leaves if a.sharding.shard_shape(a.shape) != a.shape]
    assert {str(a.dtype) for a in split} == {"int8", "float32"}
    shared.engine.close()
    assert tokens(got) == tokens(want)
    for name, out in want.items():
        ours, theirs = got[name].outputs[0], out.outputs[0]
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("named", ["awq", "fp8", "INT8"])
def test_other_methods_are_refused_with_what_there_is(named: str) -> None:
    with pytest.raises(ValueError, match=f"quantization must be one of int8, got '{named}'"):
        EngineConfig(quantization=named)


@pytest.mark.parametrize("named", ["none", ""])
def test_none_is_no_method(named: str) -> None:
    assert EngineConfig(quantization=named).quantization is None
