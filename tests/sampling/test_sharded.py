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

from jaxserve.sampling.sample import full, plain, score
from tests.sampling import rows
from tests.sampling.reference import Ask

ROWS = 16
GATHERS = re.compile(r"= (.*?) (all-gather|all-to-all|collective-permute|ragged-all-to-all)(?:-start)?\(")
SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def moved(program: jax.stages.Compiled) -> list[tuple[str, int]]:
    """Each collective that moves an array as it is, with the elements of its largest result."""
    found = []
    for shapes, name in GATHERS.findall(program.as_text()):
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


def placed(given: tuple, ways: int) -> tuple:
    """Logits and what is as wide as they are in columns, everything else on every device."""
    devices = mesh(ways)
    wide = given[0].shape
    spec = {True: NamedSharding(devices, P(None, "tensor")), False: NamedSharding(devices, P())}
    return jax.tree.map(lambda x: jax.device_put(x, spec[x.shape == wide]), given)


# (columns, tokens): multiples of everything, of 8 alone, and of what doesn't divide 48 but for the ways
SIZES = [(49152, 49152, 8), (1000, 997, 8), (3008, 3001, 4), (1002, 1000, 6), (2000, 2000, 2)]


@pytest.mark.parametrize(("size", "vocab", "ways"), SIZES)
@pytest.mark.parametrize("name", ["plain", "full", "score"])
def test_columns_stay_and_results_agree(name, size, vocab, ways):
    logits, params, text, limits, wants = arguments(size, vocab)
    function, given = {
        "plain": (partial(plain, vocab=vocab), (logits, params.temperature, params.seed, text.position)),
        "full": (partial(full, vocab=vocab, top=20), (logits, params, text, limits, wants)),
        "score": (partial(score, vocab=vocab, top=20), (logits, text.position)),
    }[name]
    here = placed(given, ways)
    program = jax.jit(function).lower(*here).compile()
    whole = ROWS * size
    large = [(op, n) for op, n in moved(program) if n >= whole / ways]
    assert not large, f"{large} of {whole}"
    assert "all-reduce" in program.as_text()
    for got, expected in zip(jax.tree.leaves(program(*here)), jax.tree.leaves(jax.jit(function)(*given)), strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(expected), rtol=1e-6, atol=1e-6)
