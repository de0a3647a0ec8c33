"""What is read from a compiled program, against programs whose work is known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxserve.device.hlo import Module
from jaxserve.device.thunks import read

LAYERS, ROWS, SIZE = 5, 8, 256
WEIGHTS = jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.float32)
X = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)


def module(run: object, *args: jax.ShapeDtypeStruct, donated: tuple[int, ...] = ()) -> Module:
    text = jax.jit(run, donate_argnums=donated).lower(*args).compile().as_text()  # type: ignore[arg-type]
    assert text is not None
    return Module.read(text)


def layers(weights: jax.Array, x: jax.Array) -> jax.Array:
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def test_products_count_as_often_as_their_loop_turns() -> None:
    assert module(layers, WEIGHTS, X).flops() == 2 * ROWS * LAYERS * SIZE * SIZE


def test_a_layer_s_slice_moves_and_not_the_stack() -> None:
    weights = 4 * LAYERS * SIZE * SIZE
    assert weights <= module(layers, WEIGHTS, X).moved() <= 3.5 * weights


def test_arrays_that_are_left_out_move_nothing() -> None:
    m = module(layers, WEIGHTS, X)
    assert m.moved(without=frozenset({WEIGHTS.shape})) < m.moved()


def test_a_loop_of_unknown_length_counts_nothing() -> None:
    def until(weights: jax.Array, x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ weights[0], x)

    m = module(until, WEIGHTS, X)
    assert m.flops() == 0
    assert [ran.op.trips for ran in m.runs() if ran.op.kind == "while"] == [None]


def test_an_update_in_place_moves_the_update() -> None:
    def put(stack: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(stack, x[None], (1, 0, 0))

    m = module(put, WEIGHTS, X, donated=(0,))
    assert m.aliased == {0}
    assert 4 * ROWS * SIZE <= m.moved() <= 4 * 4 * ROWS * SIZE


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="not the text of a compiled program"):
        Module.read("HloModule nothing\n")


SEQUENCE = """\
000: kCommandBuffer [source       | next=009 (1)]
    001: kCustomKernel [source       | sink] first grid: [1, 1, 1] threads: [32, 1, 1]
    002: kConditional  [prev=001 (1) | sink]
      false_branch:
        003: kCopy [source | sink] kCopy
      true_branch:
        No thunks.
    004: kCopy [source | sink] kCopy
009: kWhile         [prev=000 (1) | sink]
condition:
    010: kCustomKernel [source | sink] compare grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    011: kDynamicSliceFusion [source | sink] params=1, results=1
        012: kCublasLtMatmul [source | sink] kCublasLtMatmul
"""
METADATA = """\
thunk_metadata { thunk_info { profile_annotation: "choice" thunk_id: 2 } thunk_kind: "kConditional" }
thunk_metadata { thunk_info { profile_annotation: "while.1" thunk_id: 9 } thunk_kind: "kWhile" }
"""


def test_the_tree_of_launches() -> None:
    thunks = read(SEQUENCE, METADATA)
    assert [t.kind for t in thunks if t.launches] == [
        "kCustomKernel",
        "kCopy",
        "kCopy",
        "kCustomKernel",
        "kCublasLtMatmul",
    ]
    choice, after, loop, product = thunks[2], thunks[4], thunks[5], thunks[-1]
    assert (choice.name, choice.in_graph) == ("choice", True)
    assert (thunks[3].section, after.section) == ("false_branch", "")
    assert (loop.name, loop.in_graph) == ("while.1", False)
    assert [t.kind for t in thunks if t.inside("while.1")] == ["kDynamicSliceFusion", "kCublasLtMatmul"]
    assert not product.in_graph
