"""Milliseconds of the sampler by rows and by feature, on whatever backend jax finds.

    python benchmarks/sampler.py --rows 1 16 64 --vocab 49152

Logits are drawn from a normal distribution of width 3. The best of many runs is shown, since other programs share the
machine; the compile time is that of the first call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.sampling.params import RowLimits, RowParams, RowText, Wants
from jaxserve.sampling.sample import full, plain, score

Case = tuple[str, Callable, tuple]


def neutral(rows: int, vocab: int) -> tuple[RowParams, RowText, RowLimits, Wants]:
    """Rows that draw at temperature 1 and want nothing else."""
    number = partial(jnp.full, rows)
    params = RowParams(
        temperature=number(1.0),
        top_k=number(0, jnp.int32),
        top_p=number(1.0),
        min_p=number(0.0),
        presence=number(0.0),
        frequency=number(0.0),
        repetition=number(1.0),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        min_tokens=number(0, jnp.int32),
    )
    text = RowText(
        position=number(7, jnp.int32),
        generated=number(3, jnp.int32),
        counts=jnp.zeros((rows, vocab), jnp.uint16),
        in_prompt=jnp.zeros((rows, vocab), bool),
        recent=jnp.full((rows, 7), -1, jnp.int32),
    )
    words = -(-vocab // 32)
    limits = RowLimits(
        allow=jnp.full((rows, words), 0xFFFFFFFF, jnp.uint32),
        stops=jnp.zeros((rows, words), jnp.uint32),
        bias_ids=jnp.full((rows, 64), -1, jnp.int32),
        bias=jnp.zeros((rows, 64)),
        bad=jnp.full((rows, 32, 8), -1, jnp.int32),
    )
    return params, text, limits, Wants(*[jnp.bool_(False)] * 5)


def cases(logits: jax.Array, top: int) -> Iterator[Case]:
    rows, vocab = logits.shape
    params, text, limits, none = neutral(rows, vocab)
    yield "plain", partial(plain, vocab=vocab), (logits, params.temperature, params.seed, text.position)
    whole = partial(full, vocab=vocab, top=top)

    def case(name: str, wants: Wants = none, **asked: jax.Array) -> Case:
        return name, whole, (logits, replace(params, **asked), text, limits, wants)

    yes = jnp.bool_(True)
    some_k, some_p = jnp.full(rows, 50, jnp.int32), jnp.full(rows, 0.9)
    yield case("full, nothing wanted")
    yield case("full, bias", replace(none, bias=yes))
    yield case("full, bad words", replace(none, bad_words=yes))
    yield case("full, penalties", replace(none, penalties=yes))
    yield case("full, min_p", replace(none, truncation=yes), min_p=jnp.full(rows, 0.05))
    yield case("full, top_k 50", replace(none, truncation=yes), top_k=some_k)
    yield case("full, top_p 0.9", replace(none, truncation=yes), top_p=some_p)
    yield case("full, top_k and top_p", replace(none, truncation=yes), top_k=some_k, top_p=some_p)
    yield case(f"full, {top} logprobs", replace(none, logprobs=yes))
    yield case("full, everything", Wants(*[yes] * 5), top_k=some_k, top_p=some_p, min_p=jnp.full(rows, 0.01))
    yield f"score, {top} logprobs", partial(score, vocab=vocab, top=top), (logits, text.position)


def timed(function: Callable, arguments: tuple, runs: int) -> tuple[float, float, float]:
    """Best and median milliseconds of a run, and seconds to compile."""
    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    compiled = time.perf_counter() - start
    took = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        took.append(1e3 * (time.perf_counter() - start))
    return min(took[1:]), float(np.median(took[1:])), compiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--top", type=int, default=20, help="how many likeliest tokens to give")
    parser.add_argument("--runs", type=int, default=20)
    given = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, vocabulary {given.vocab}")
    for rows in given.rows:
        logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (rows, given.vocab)), jnp.float32)
        for name, function, arguments in cases(logits, given.top):
            best, median, compiled = timed(function, arguments, given.runs)
            print(f"{rows:5d} rows  {name:24s} {best:8.2f} ms  (median {median:.2f}, compiled in {compiled:.2f} s)")


if __name__ == "__main__":
    main()
