"""Rotation and angles against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.dense import OneSequence
from jaxserve.layers.rope import Rope, Stretch, rotate

DRAW = np.random.default_rng(0)
FREQ = 10_000.0 ** (-np.arange(8) / 8)


def step(positions, prompt_len: int = 0) -> OneSequence:
    positions = jnp.asarray(positions, jnp.int32)
    return OneSequence(positions, jnp.full(len(positions), prompt_len, jnp.int32))


def test_angles_stay_accurate_at_far_positions():
    at = np.array([0, 1, 255, 257, 4_000])
    cos, sin = Rope(tuple(FREQ)).cos_sin(step(at))
    assert cos.dtype == sin.dtype == jnp.float32
    np.testing.assert_allclose(cos, np.cos(at[:, None] * FREQ), atol=1e-3)
    np.testing.assert_allclose(sin, np.sin(at[:, None] * FREQ), atol=1e-3)


def test_scale_multiplies_both():
    cos, sin = Rope(tuple(FREQ), scale=1.25).cos_sin(step([3]))
    np.testing.assert_allclose(cos**2 + sin**2, 1.25**2, rtol=1e-5)


def test_rotation_is_multiplication_of_complex_numbers():
    x = DRAW.normal(size=(4, 3, 16)).astype(np.float32)
    at = np.array([0, 1, 7, 30])
    got = np.asarray(rotate(jnp.asarray(x), Rope(tuple(FREQ)).cos_sin(step(at))))
    want = (x[..., :8] + 1j * x[..., 8:]) * np.exp(1j * at[:, None, None] * FREQ)
    np.testing.assert_allclose(got[..., :8] + 1j * got[..., 8:], want, atol=1e-4)


def test_dimensions_that_are_not_rotated_pass():
    x = jnp.asarray(DRAW.normal(size=(2, 3, 20)), jnp.bfloat16)
    got = rotate(x, Rope(tuple(FREQ)).cos_sin(step([5, 9])))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got[..., 16:], x[..., 16:])
    assert (got[..., :16] != x[..., :16]).mean() > 0.5


def base_angles(position: int, length: int, factor: float = 2.0, original: int = 16) -> np.ndarray:
    """Dynamic NTK as it is published: a new base for a length, then the plain frequencies."""
    grown = max(length, original)
    base = 10_000.0 * (factor * grown / original - (factor - 1)) ** (16 / 14)
    return position * base ** (-np.arange(8) / 8)


@pytest.mark.parametrize("prompt_len", [1, 16, 17, 40])
def test_dynamic_rope_follows_the_longer_of_prompt_and_position(prompt_len: int):
    rope = Rope(tuple(FREQ), stretch=Stretch(2.0, 16))
    at = np.arange(50)
    cos, sin = rope.cos_sin(step(at, prompt_len))
    want = np.stack([base_angles(p, max(prompt_len, p + 1)) for p in at])
    np.testing.assert_allclose(cos, np.cos(want), atol=1e-4)
    np.testing.assert_allclose(sin, np.sin(want), atol=1e-4)


@pytest.mark.parametrize(("one", "other", "equal"), [(3, 16, True), (16, 17, False), (20, 20, True), (20, 30, False)])
def test_what_prompts_must_share_to_share_keys(one: int, other: int, equal: bool):
    rope = Rope(tuple(FREQ), stretch=Stretch(2.0, 16))
    both = range(min(one, other))
    same = np.array_equal(rope.cos_sin(step(both, one))[0], rope.cos_sin(step(both, other))[0])
    assert same == equal == (rope.stretch.length_of(one) == rope.stretch.length_of(other))
