"""The paged attention kernel in jax's interpreter, against plain jnp; and that the cut into units never shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention import paged_attention, reference, schedule, supported
from pallas_kernels.paged_attention import units as cut
from pallas_kernels.paged_attention.cases import SMALL, Case

TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3}


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    yield
    interpreter.reset_gpu_interpret_mode_state()


def computed(case: Case, arrays: dict[str, jax.Array]) -> np.ndarray:
    """f32[T, N, H]"""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = jax.jit(lambda a: paged_attention(**a, **case.options(), interpret=interpret))(arrays)
    return np.asarray(out.astype(jnp.float32))


@pytest.mark.parametrize("name", SMALL)
def test_kernel_matches_reference(name: str) -> None:
    case = SMALL[name]
    arrays = case.arrays()
    out = computed(case, arrays)
    expected = reference.paged_attention(**arrays, **case.options()).astype(jnp.float32)
    np.testing.assert_allclose(out, expected, rtol=TOLERANCE[case.dtype], atol=TOLERANCE[case.dtype])
    assert not interpreter.get_races().races_found


def test_cut_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token decoded alone, its splits through memory, equals the same token in one unit, and behind others."""
    alone = Case(((1, 300),), heads=2, kv_heads=1, page=128, longest=384)
    many = replace(alone, chunks=((3, 300),))
    arrays = many.arrays()
    lone = arrays | {"q": arrays["q"][2:], "counts": jnp.array([1], jnp.int32)}
    split = computed(alone, lone)
    with monkeypatch.context() as patch:
        patch.setattr(cut, "SLOTS", 0)
        whole = computed(alone, lone)
    np.testing.assert_array_equal(split, whole)
    np.testing.assert_array_equal(split[0], computed(many, arrays)[2])


@pytest.mark.parametrize("slots", [0, 3, 8, 1024])
def test_units_cover_every_token_and_key_once(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut, "SLOTS", slots)
    counts, lengths = np.array([1, 40, 1, 0, 1]), np.array([1000, 700, 257, 0, 3])
    starts, tokens, per_unit = np.cumsum(counts) - counts, 50, 16
    made = schedule(
        *(jnp.asarray(a) for a in (starts, counts, lengths)), tokens=tokens, longest=2048, per_unit=per_unit
    )
    units = np.asarray(made.units)[: int(made.count)]
    seen = np.zeros((tokens, 2048 // cut.TILE), int)
    for _, token, count, _, first, last, _, _ in units:
        assert 1 <= count <= per_unit
        seen[token : token + count, first:last] += 1
    assert seen.max() == 1
    for start, count, length in zip(starts, counts, lengths, strict=True):
        for i in range(count):
            position = length - count + i
            assert seen[start + i, : position // cut.TILE + 1].all()
    places = units[units[:, 6] >= 0, 6]
    assert sorted(places) == list(range(len(places))) and len(places) <= slots
    assert int(np.asarray(made.merges)[:, 0].sum()) == len(places)


def test_kernel_refuses_what_it_does_not_serve() -> None:
    case = SMALL["window"]
    arrays = case.arrays()
    with pytest.raises(ValueError, match="float8_e5m2"):
        paged_attention(**arrays | {"kv": arrays["kv"].astype(jnp.float8_e5m2)}, **case.options())
    with pytest.raises(ValueError, match="scales of keys and values in bfloat16"):
        paged_attention(**arrays, kv_scales=jnp.ones((2, case.kv_heads)), **case.options())


SERVED = {"heads": 32, "kv_heads": 8, "size": 128, "page": 16, "dtype": jnp.bfloat16, "kv_dtype": jnp.bfloat16}
HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, None),
        ({"device": SimpleNamespace(platform="cpu")}, "is a cpu"),
        ({"device": SimpleNamespace(platform="gpu", compute_capability="8.9")}, "capability 8.9"),
        ({"device": SimpleNamespace(platform="gpu", compute_capability="10.0")}, "capability 10"),
        ({"size": 80}, "heads of 80"),
        ({"page": 8}, "pages of 8"),
        ({"heads": 128, "kv_heads": 1}, "128 query heads"),
        ({"dtype": jnp.float32, "kv_dtype": jnp.float32}, "float32"),
        ({"kv_dtype": jnp.uint8}, None),
        ({"kv_dtype": jnp.float8_e5m2}, "float8_e5m2"),
    ],
)
def test_supported_says_why_not(changed: dict[str, object], reason: str | None) -> None:
    said = supported(**{"device": HOPPER, **SERVED, **changed})
    assert said is None if reason is None else reason in (said or "")
