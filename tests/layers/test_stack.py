"""How models are cut into segments, and the loop over them, against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.layers import dense
from jaxserve.layers.stack import MAX_GROUP, Run, run_layers, runs
from tests.models.toys import TOYS, VOCAB, unrolled

IDS = np.random.default_rng(0).integers(0, VOCAB, (2, 17)).astype(np.int32)


@pytest.mark.parametrize(
    ("kinds", "cut"),
    [
        ("aaaa", [("a", 4)]),
        ("abab", [("ab", 2)]),
        ("abbb", [("a", 1), ("b", 3)]),
        ("aaabbb", [("a", 3), ("b", 3)]),
        ("aabaabaa", [("aab", 2), ("a", 2)]),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
        ("lllllg" * 4 + "ll", [("lllllg", 4), ("l", 2)]),
    ],
)
def test_cuts(kinds: str, cut: list[tuple[str, int]]):
    assert [("".join(run.kinds), run.times) for run in runs(kinds)] == cut


def test_layer_numbers_of_a_group():
    run = Run(("a", "b"), first=3, times=3)
    assert (run.layers(0), run.layers(1)) == ((3, 5, 7), (4, 6, 8))


@given(st.text(alphabet="abc", min_size=1, max_size=30))
def test_every_layer_is_in_one_segment(kinds: str):
    of_layer = {layer: kind for run in runs(kinds) for b, kind in enumerate(run.kinds) for layer in run.layers(b)}
    assert "".join(of_layer[layer] for layer in range(len(kinds))) == kinds
    assert sum(len(run.kinds) * run.times for run in runs(kinds)) == len(kinds)
    assert all(len(run.kinds) <= MAX_GROUP for run in runs(kinds))


@pytest.mark.parametrize("name", TOYS)
def test_the_loop_is_the_unrolled_one(name: str):
    toy, _ = TOYS[name]()
    got = jax.jit(dense.apply)(toy, IDS)
    for one, ids in zip(got, IDS, strict=True):
        np.testing.assert_allclose(one, unrolled(toy, jnp.asarray(ids)), atol=1e-5)


@pytest.mark.parametrize("name", TOYS)
def test_every_layer_has_its_own_place_in_its_groups_cache(name: str):
    toy, groups = TOYS[name]()
    seen = tuple(jnp.zeros(group.layers) for group in groups)
    step = dense.OneSequence(jnp.arange(5), jnp.full(5, 5))

    def count(q, k, v, cache, layer, group, *, window, scale):
        return q, cache.at[layer].add(1)

    _, seen = run_layers(toy.segments, toy.embed_tokens(IDS[0, :5]), seen, step, count)
    assert all((counts == 1).all() for counts in seen)


def test_blocks_start_from_their_own_keys():
    toy, _ = TOYS["first_dense"]()
    stack = toy.segments[1].blocks[0].qkv.w[...]
    assert all(not np.array_equal(stack[0], other) for other in stack[1:])
