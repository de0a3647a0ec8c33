"""Engines that keep keys and values in 8 bits: near the full answers, and the same ones whatever else happens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import EngineConfig
from jaxserve.launching import Launched
from jaxserve.layers import dense
from jaxserve.layers.stack import Decoder
from tests.device.engines import Tight, engine, request, run, start, tokens
from tests.device.test_executor import TIGHT_PAGES, ask
from tests.device.test_reference import cut, logprobs, walk
from tests.models.cases import Case


@pytest.fixture(scope="module", params=["plain", "deterministic"])
def llama(request: pytest.FixtureRequest) -> Iterator[Launched]:
    launched = start("llama3", kv_cache_dtype="fp8", deterministic=request.param == "deterministic")
    yield launched
    launched.engine.close()


@pytest.mark.parametrize("size", [64, 7, 1], ids=["whole", "chunks", "tokens"])
def test_logprobs_are_those_of_rounded_keys_and_values(
    llama: Launched, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And near those of transformers, as near as heads of 8 allow; of unrelated logits they would be off by more than
    1."""
    plain = dense.attend

    def rounded(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
        k, v = (x.astype(jnp.float8_e4m3fn).astype(x.dtype) for x in (k, v))
        return plain(q, k, v, **options)

    monkeypatch.setattr(dense, "attend", rounded)
    for recorded in Case("llama3").recorded():
        ids, at = recorded.ids, np.arange(len(recorded.ids) - 1)
        got = walk(llama.executor, recorded, cut(len(ids), size))
        logits = dense.apply(cast(Decoder, llama.model), jnp.asarray(ids)[None], prompt_len=recorded.prompt_len)
        assert np.abs(got - logprobs(np.asarray(logits[0]))[at, ids[1:]]).mean() < 2e-3
        assert 1e-2 < np.abs(got - logprobs(recorded.logits)[at, ids[1:]]).mean() < 0.2


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


def test_a_token_takes_a_byte_a_value(llama: Launched) -> None:
    """A quarter of float32, in what is allocated and in what the pool is sized by."""
    (pool,) = llama.executor.shapes.kv
    assert pool.dtype.itemsize == 1
    wide = start("llama3", num_pages=None, kv_cache_memory_bytes=2**20, max_model_len=32)
    narrow = start("llama3", num_pages=None, kv_cache_memory_bytes=2**20, max_model_len=32, kv_cache_dtype="fp8_e4m3")
    assert narrow.executor.shapes.step.pages[0] == 4 * wide.executor.shapes.step.pages[0]
    for launched in (wide, narrow):
        launched.engine.close()


def test_devices_share_the_pool(eight_heads: Path) -> None:
    found = []
    for ways in (1, 2):
        launched = start(eight_heads, kv_cache_dtype="fp8", tensor_parallel_size=ways)
        (pool,) = launched.executor.shapes.kv
        assert pool.sharding.shard_shape(pool.shape)[2] == 2 // ways
        answers = run(engine(launched), ask(logprobs=1, max_tokens=1))
        found.append({name: out.outputs[0].cumulative_logprob for name, out in answers.items()})
        launched.engine.close()
    assert found[0] == pytest.approx(found[1], abs=0.05)


def test_native_kernels_cannot_be_demanded() -> None:
    with pytest.raises(
        ValueError, match=r"cpu_kernels native: .* set kv_cache_dtype to auto; or set cpu_kernels to auto"
    ):
        start("llama3", kv_cache_dtype="fp8", cpu_kernels="native")
    with pytest.raises(ValueError, match=r"cpu_kernels native: .* no float16; set dtype to bfloat16"):
        start("llama3", dtype="float16", cpu_kernels="native")


@pytest.mark.parametrize("named", ["fp8_e5m2", "int8", "bfloat16", "FP8"])
def test_other_types_are_refused_with_what_there_is(named: str) -> None:
    with pytest.raises(ValueError, match=f"kv_cache_dtype must be one of auto, fp8, fp8_e4m3, got '{named}'"):
        EngineConfig(kv_cache_dtype=named)  # type: ignore[arg-type]
