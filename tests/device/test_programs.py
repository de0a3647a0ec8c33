"""What the compiler made of the programs: collectives, memory that changes in place, and nothing compiled later."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxserve.device import programs
from jaxserve.launching import Launched
from tests.device.engines import engine, request, run, start
from tests.device.test_executor import PROMPTS

COLLECTIVES = r"= \S+ (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("


def computations(text: str) -> dict[str, str]:
    """Bodies of a module's computations, by name."""
    return {m[1]: m[2] for m in re.finditer(r"^(?:ENTRY )?%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.S | re.M)}


def layer_loop(text: str) -> str:
    """The loop over layers is the outermost one that multiplies matrices."""
    parts = computations(text)
    whole = {
        name: parts[name] + "".join(called(parts, name))
        for part in parts.values()
        for name in re.findall(r"while\([^\n]*body=%?([\w.\-]+)", part)
    }
    return max((body for body in whole.values() if "dot(" in body), key=len)


def called(parts: dict[str, str], name: str) -> Iterator[str]:
    """The computations that `name` calls or fuses, however deep."""
    for other in re.findall(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)", parts[name]):
        yield parts[other]
        yield from called(parts, other)


@pytest.mark.parametrize("ways", [2, 4, 8])
def test_two_all_reduces_a_layer_and_no_other_collective(eight_heads: Path, ways: int) -> None:
    launched = start(eight_heads, tensor_parallel_size=ways)
    text = programs.forward(launched.executor.shapes, 64).lower().compile().as_text()
    assert text is not None
    assert Counter(re.findall(COLLECTIVES, layer_loop(text))) == {"all-reduce": 2}
    launched.engine.close()


@pytest.fixture(scope="module")
def llama() -> Iterator[Launched]:
    launched = start("llama3")
    yield launched
    launched.engine.close()


def test_rows_and_pool_change_in_place(llama: Launched) -> None:
    """Everything donated is aliased, and no temporary is as large as the pool."""
    shapes = llama.executor.shapes
    pool = programs.nbytes(shapes.kv)
    for program in (programs.forward(shapes, 64), programs.sample(shapes, 4, full=True)):
        memory = program.lower().compile().memory_analysis()
        assert memory.alias_size_in_bytes > 0.99 * memory.output_size_in_bytes - 4096
    assert programs.forward(shapes, 64).lower().compile().memory_analysis().alias_size_in_bytes > pool


def test_a_recompile_is_counted_and_may_be_an_error() -> None:
    launched = start("llama3", on_recompile="error")
    run(engine(launched), [request("a", PROMPTS[2])])
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(17)).block_until_ready()
    with pytest.raises(RuntimeError, match="compiled a program after warm-up"):
        launched.engine.add(request("b", PROMPTS[2]))
    with pytest.raises(RuntimeError, match="compiled a program after warm-up"):
        launched.engine.step()
    launched.engine.close()


def test_closing_frees_the_device_memory() -> None:
    launched = start("llama3")
    held = [*launched.executor.leaves, *jax.tree.leaves(launched.model)]
    assert {id(a) for a in launched.executor.leaves} == {id(a) for a in jax.tree.leaves(launched.model)}
    launched.engine.close()
    assert all(array.is_deleted() for array in held)
