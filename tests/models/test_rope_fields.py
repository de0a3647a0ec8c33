"""Rope fields of a config.json, against the frequencies that transformers makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.models import rope
from tests.models.cases import ROPES

RECORDED = json.loads(ROPES.read_text())
BASE = {"rope_theta": 10_000.0}


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: rope.rope_type(r["config"]))
def test_frequencies_are_those_of_transformers(recorded: dict):
    config = recorded["config"]
    found = rope.from_hf(config, recorded["head_dim"], config["max_position_embeddings"])
    np.testing.assert_allclose(found.inv_freq, recorded["inv_freq"], rtol=1e-6)
    assert found.scale == pytest.approx(recorded["scale"], rel=1e-6)


def test_factors_divide():
    divisors = [1.0, 2.0, 4.0, 8.0]
    plain = rope.from_hf(BASE, 8, 64)
    found = rope.from_hf({"rope_parameters": {"rope_type": "factors", "factors": divisors, **BASE}}, 8, 64)
    np.testing.assert_allclose(np.multiply(found.inv_freq, divisors), plain.inv_freq)


def test_partial_rotation_turns_the_first_dimensions():
    found = rope.from_hf({**BASE, "partial_rotary_factor": 0.5}, 16, 64)
    np.testing.assert_allclose(found.inv_freq, rope.from_hf(BASE, 8, 64).inv_freq)


def test_the_inner_base_beats_the_outer_one():
    found = rope.from_hf({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, 4, 64)
    np.testing.assert_allclose(found.inv_freq, [1.0, 0.1])


def test_without_fields_the_base_is_ten_thousand():
    np.testing.assert_allclose(rope.from_hf({}, 4, 64).inv_freq, [1.0, 0.01])


@pytest.mark.parametrize(
    ("fields", "longest"),
    [
        ({}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 128),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}, 128),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
    ],
)
def test_longest_sequence(fields: dict, longest: int):
    assert rope.longest(fields, 64) == longest


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
        ({"rope_parameters": {"rope_type": "su"}}, "rope_parameters.rope_type"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1}}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": {"type": "llama3", "low_freq_factor": 4, "high_freq_factor": 1}}, "low_freq_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": -1}}, "rope_scaling.attention_factor"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "rope_parameters.factors"),
        ({"rope_parameters": {"rope_type": "factors"}}, "rope_parameters.factors"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ({"rope_theta": float("nan")}, "rope_theta"),
    ],
)
def test_errors_name_the_field(fields: dict, named: str):
    with pytest.raises(ValueError, match=named):
        rope.from_hf(fields, 8, 64)
