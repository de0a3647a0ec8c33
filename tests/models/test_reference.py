"""Every family against logits that transformers computed for the same tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers import dense
from jaxserve.models import rope
from jaxserve.models.config import DecoderConfig
from tests.models.cases import CASES, Case, Recorded
from tests.models.loading import load_model, read_config

TOLERANCE = 1e-4
BY_NAME = {case.name: case for case in CASES}
apply = jax.jit(dense.apply, static_argnames="prompt_len")


def difference(model, recorded: Recorded, prompt_len: int | None = None) -> float:
    got = apply(model, recorded.ids[None], prompt_len=prompt_len or recorded.prompt_len)[0]
    return float(np.abs(got[:, : recorded.logits.shape[1]] - recorded.logits).max())


def test_no_case_was_lost():
    assert len(CASES) == 11


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_are_those_of_transformers(case: Case):
    model = load_model(case.directory)
    assert max(difference(model, recorded) for recorded in case.recorded()) < TOLERANCE


@pytest.mark.parametrize("name", ["llama3", "qwen3", "bias"])
def test_four_devices_give_the_same_logits(name: str):
    """With fewer KV heads than devices, and a vocabulary that does not divide."""
    case = BY_NAME[name]
    c, model = read_config(case.directory, ways=4), load_model(case.directory, ways=4)
    assert (c.kv_heads, c.padded_vocab) == (4, 128)
    recorded = case.recorded()[1]
    assert difference(model, recorded) < TOLERANCE
    assert np.isneginf(apply(model, recorded.ids[None], prompt_len=recorded.prompt_len)[0, :, 101:]).all()


def unscaled(theta: float) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda c: replace(c, rope=rope.from_hf({"rope_theta": theta}, c.head_dim, c.max_position))


def windowed(by: int) -> Callable[[DecoderConfig], DecoderConfig]:
    return lambda c: replace(c, windows=tuple(w and w + by for w in c.windows))


MISTAKES = [
    ("llama3", unscaled(5e5)),
    *((name, unscaled(1e4)) for name in ("linear", "dynamic", "yarn")),
    ("yarn", lambda c: replace(c, rope=replace(c.rope, scale=1.0))),
    *((name, windowed(by)) for name in ("mistral", "qwen2_window", "qwen3_alternating") for by in (-1, 1)),
    ("qwen2_window", lambda c: replace(c, windows=c.windows[::-1])),
    ("qwen3_alternating", lambda c: replace(c, windows=c.windows[::-1])),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES)
def test_a_mistake_would_show(name: str, mistake: Callable[[DecoderConfig], DecoderConfig]):
    case = BY_NAME[name]
    model = load_model(case.directory, change=mistake)
    assert difference(model, case.recorded()[1]) > 100 * TOLERANCE


def test_short_sequences_do_not_see_the_window():
    case = BY_NAME["mistral"]
    model = load_model(case.directory, change=windowed(100))
    assert difference(model, case.recorded()[0]) < TOLERANCE


def test_dynamic_rope_depends_on_the_length_of_the_prompt():
    case = BY_NAME["dynamic"]
    model = load_model(case.directory)
    continued = case.recorded()[2]
    assert difference(model, continued) < TOLERANCE
    assert difference(model, continued, prompt_len=40) > 100 * TOLERANCE


def test_bfloat16_stays_near():
    case = BY_NAME["qwen3"]
    model = load_model(case.directory, dtype=jnp.bfloat16)
    recorded = case.recorded()[1]
    got = apply(model, recorded.ids[None])[0, :, : recorded.logits.shape[1]]
    assert got.dtype == jnp.float32
    assert np.abs(got - recorded.logits).mean() < 0.05 * recorded.logits.std()
