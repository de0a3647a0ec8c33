"""Under tensor parallelism: the vocabulary stays where it is, and the answers are those of one device."""

import re
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxserve.sampling.branch import where_wanted
from jaxserve.sampling.sample import full, plain, score
from tests.sampling import rows
from tests.sampling.reference import Ask

ROWS = 16
MOVES = re.compile(r"= (.*?) (all-[a-z-]+?|collective-[a-z]+|ragged-[a-z-]+?|reduce-scatter)(?:-start)?\(")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def moved(program: jax.stages.Compiled) -> list[tuple[str, int]]:
    """Each collective, with the elements of its largest result."""
    found = []
    for shapes, name in MOVES.findall(program.as_text()):
        sizes = [prod(int(n) for n in dims.split(",") if n) for dims in SHAPE.findall(shapes)]
        found.append((name, max(sizes)))
    return found


def mesh(ways: int) -> Mesh:
    return jax.make_mesh((ways,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:ways])


def asks() -> list[Ask]:
    kinds = [
        Ask(temperature=0),
        Ask(temperature=0.8),
        Ask(top_k=20, top_p=0.9, min_p=0.01),
        Ask(repetition=1.2, presence=1, output=(1, 2, 3, 3), bias={5: 3.0, 600: 2.0}, bad=((3, 3, 7), (900,))),
    ]
    return [Ask(**{**vars(kinds[i % 4]), "seed": i, "position": i}) for i in range(ROWS)]


def arguments(size: int, vocab: int) -> tuple:
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (ROWS, size)), jnp.float32)
    return logits, rows.params(asks()), rows.text(asks(), size), rows.limits(asks(), vocab), rows.ALL


def split(ways: int) -> NamedSharding:
    return NamedSharding(mesh(ways), P(None, "tensor"))


def placed(given: tuple, ways: int) -> tuple:
    """Logits and what is as wide as they are in columns, everything else on every device."""
    wide, spec = given[0].shape, {True: split(ways), False: NamedSharding(mesh(ways), P())}
    return jax.tree.map(lambda x: jax.device_put(x, spec[x.shape == wide]), given)


# (columns, tokens, ways): round numbers; a padded vocabulary, lanes not full and ways that are no power of two
SIZES = [(49152, 49152, 8), (3006, 3001, 6)]


@pytest.mark.parametrize(("size", "vocab", "ways"), SIZES)
@pytest.mark.parametrize("name", ["plain", "full", "score"])
def test_columns_stay_and_results_agree(name, size, vocab, ways):
    logits, params, text, limits, wants = arguments(size, vocab)
    function, given = {
        "plain": (partial(plain, vocab=vocab), (logits, params.temperature, params.seed, text.position)),
        "full": (partial(full, vocab=vocab, top=4, columns=split(ways)), (logits, params, text, limits, wants)),
        "score": (partial(score, vocab=vocab, top=4), (logits, text.position)),
    }[name]
    here = placed(given, ways)
    program = jax.jit(function).lower(*here).compile()
    collectives = moved(program)
    assert any(op == "all-reduce" for op, _ in collectives)
    large = [(op, count) for op, count in collectives if count > ROWS * size // 8]
    assert not large, f"{large} of {ROWS * size}"
    alone = {"plain": rows.compiled_plain(vocab), "full": rows.compiled_full(vocab, 4), "score": jax.jit(function)}[
        name
    ]
    for got, expected in zip(jax.tree.leaves(program(*here)), jax.tree.leaves(alone(*given)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("size", [8, 6])
def test_a_branch_keeps_columns_where_the_ways_divide_them(size, wanted):
    x = jnp.arange(2.0 * size).reshape(2, size)
    got = jax.jit(lambda on, x: where_wanted(on, lambda x: x + 1, x, split(4)))(jnp.bool_(wanted), x)
    np.testing.assert_array_equal(got, x + wanted)
    assert len(got.sharding.device_set) == (4 if size == 8 else 1)
