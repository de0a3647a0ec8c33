"""The list of programs an engine runs, compiled before it starts: another shape raises, nothing compiles later.

Owns the buckets and what each program is made of. Knows shapes only: no weights, no memory that is in use.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.device import executables, step
from jaxserve.device import mesh as meshes
from jaxserve.device import rows as rowlib
from jaxserve.device.executables import Executable, Options, Program, Store
from jaxserve.device.rows import Rows, RowShape
from jaxserve.device.step import KV, Sampled, StepShape, Work
from jaxserve.sampling.params import RowLimits

log = logging.getLogger(__name__)

SCORED = 64
"""Prompt tokens that one `score` call takes."""

Masks = dict[int, jax.Array]
"""For each row bucket i32[S, W]: what its rows may say."""
Empty = Callable[[], tuple[Rows, KV, Work, Masks]]
Forward = Callable[[list[jax.Array], Rows, KV, Work, np.ndarray], tuple[Rows, KV, Work]]
Sample = Callable[..., tuple[Rows, Sampled]]
"""Of leaves, rows, picked hidden states, the upload; in the full form of masks too."""
Score = Callable[[list[jax.Array], jax.Array, np.ndarray, np.ndarray], Sampled]
Admit = Callable[[Rows, np.ndarray], Rows]
Limit = Callable[[Rows, np.int32, RowLimits], Rows]
Restore = Callable[[Rows, np.ndarray, np.ndarray, np.ndarray], Rows]
Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many of it are done, and how many there are."""


@dataclass(frozen=True)
class Buckets:
    """The shapes that compile. A step takes the smallest that holds it."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]

    @staticmethod
    def choose(*, tokens: int, rows: int, least_tokens: int, least_rows: int) -> Buckets:
        """Powers of two up to `tokens`, powers of four up to `rows`, none below the least."""
        return Buckets(_series(min(least_tokens, tokens), tokens, 2), _series(min(max(least_rows, 1), rows), rows, 4))


def _series(first: int, last: int, factor: int) -> tuple[int, ...]:
    sizes = [first]
    while sizes[-1] < last:
        sizes.append(min(sizes[-1] * factor, last))
    return tuple(sizes)


@dataclass(frozen=True)
class Shapes:
    """All sizes that the programs depend on."""

    step: StepShape
    rows: RowShape
    buckets: Buckets
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    """With their shardings."""
    kv: tuple[jax.ShapeDtypeStruct, ...]
    work: Work
    """Of `ShapeDtypeStruct`s."""

    @property
    def mesh(self) -> Mesh:
        return self.step.mesh

    @functools.cached_property
    def empty_rows(self) -> Rows:
        """Of `ShapeDtypeStruct`s: what has a column per token is split like the logits, the rest is on every device."""
        shapes = jax.eval_shape(functools.partial(rowlib.empty, self.rows))
        everywhere = jax.tree.map(lambda _: meshes.replicated(self.mesh), shapes)
        columns = meshes.split_columns(self.mesh)
        return jax.tree.map(
            lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
            shapes,
            dataclasses.replace(everywhere, counts=columns, in_prompt=columns),
        )

    def chunks(self, tokens: int) -> int:
        """Chunks in a step of this token bucket: each has a token at least."""
        return min(self.rows.rows, tokens)

    def entries(self, tokens: int) -> int:
        """Page-table entries that a step of this token bucket may add."""
        return (self.chunks(tokens) + -(-tokens // self.step.page)) * len(self.kv)

    def with_pages(self, pages: tuple[int, ...]) -> Shapes:
        """The same with another pool."""
        kv = tuple(
            jax.ShapeDtypeStruct((a.shape[0] // old * new, *a.shape[1:]), a.dtype, sharding=a.sharding)
            for a, old, new in zip(self.kv, self.step.pages, pages, strict=True)
        )
        return dataclasses.replace(self, step=dataclasses.replace(self.step, pages=pages), kv=kv)


@dataclass(frozen=True)
class Programs:
    """The executables. `forward` by token bucket, `sample` by (row bucket, full)."""

    empty: Empty
    """What an engine has before its first step; its masks allow everything."""
    forward: Mapping[int, Forward]
    sample: Mapping[tuple[int, bool], Sample]
    score: Score
    admit: Admit
    limit: Limit
    restore: Restore


def compile_all(
    shapes: Shapes, *, options: Options | None = None, store: Store | None = None, progress: Progress
) -> Programs:
    """Loads every program that is kept in the store and compiles the others, two at a time."""
    jobs, options = every(shapes), options or {}
    made: dict[str, Executable] = {}

    def load(job: Program) -> None:
        found = None if store is None else store.load(job, options)
        if found is not None:
            made[job.name] = found
            progress("loading programs", len(made), len(jobs))

    def compile_(job: Program) -> None:
        progress(f"compiling {job.name}", len(made), len(jobs))
        made[job.name] = executables.compile_and_keep(job, options, store)

    with ThreadPoolExecutor(2, thread_name_prefix="programs") as pool:
        list(pool.map(load, jobs))
        missing = [job for job in jobs if job.name not in made]
        if store is not None:
            log.info("programs: %d loaded from %s, %d to compile", len(made), store.directory, len(missing))
        with executables.without_jax_cache() if missing and store is not None else nullcontext():
            list(pool.map(compile_, missing))
    return Programs(
        empty=made["empty"],
        forward={t: made[f"forward {t}"] for t in shapes.buckets.tokens},
        sample={(r, full): made[_sample_name(r, full)] for r in shapes.buckets.rows for full in (False, True)},
        score=made["score"],
        admit=made["admit"],
        limit=made["limit"],
        restore=made["restore"],
    )


def temporary_bytes(shapes: Shapes, options: Options | None = None, store: Store | None = None) -> int:
    """What the largest programs need beside their arguments and results, by the compiler's own count, per device."""
    largest = (
        forward(shapes, shapes.buckets.tokens[-1]),
        sample(shapes, shapes.buckets.rows[-1], full=True),
        score(shapes),
    )
    return max(executables.temporary_bytes(program, options or {}, store) for program in largest)


def every(shapes: Shapes) -> list[Program]:
    """All programs of an engine; the longest first, so that two threads end together."""
    forwards = [forward(shapes, t) for t in reversed(shapes.buckets.tokens)]
    samples = [sample(shapes, r, full=full) for r in reversed(shapes.buckets.rows) for full in (True, False)]
    return [*forwards, *samples, score(shapes), _empty(shapes), _admit(shapes), _limit(shapes), _restore(shapes)]


def _sample_name(rows: int, full: bool) -> str:
    return f"sample {rows}" + " full" * full


def forward(s: Shapes, tokens: int) -> Program:
    """`step.forward` of a token bucket."""
    chunks, rows = s.chunks(tokens), s.empty_rows
    packed = _ints(s, step.upload_size(tokens, chunks, s.entries(tokens)))
    return Program(
        f"forward {tokens}",
        step.forward,
        (s.step, tokens, chunks),
        (list(s.leaves), rows, s.kv, s.work, packed),
        donated=(1, 2, 3),
        results=(_shardings(rows), _shardings(s.kv), _shardings(s.work)),
    )


def sample(s: Shapes, rows: int, *, full: bool) -> Program:
    """`step.sample` of a row bucket, plain or full."""
    masks = [_ints(s, rows, s.rows.words)] if full else []
    return Program(
        _sample_name(rows, full),
        step.sample,
        (_without_pool(s), rows),
        (list(s.leaves), s.empty_rows, s.work.picked, _ints(s, rows + len(step.WANTS)), *masks),
        donated=(1,),
        results=(_shardings(s.empty_rows), meshes.replicated(s.mesh)),
    )


def score(s: Shapes) -> Program:
    """`step.score`."""
    args = (list(s.leaves), s.work.hidden, _ints(s, SCORED), _ints(s, SCORED))
    return Program("score", step.score, (_without_pool(s),), args, donated=(), results=meshes.replicated(s.mesh))


def _without_pool(s: Shapes) -> StepShape:
    """For programs that see no KV: another pool is no other program."""
    return dataclasses.replace(s.step, pages=())


def _empty(s: Shapes) -> Program:
    masks = {rows: _ints(s, rows, s.rows.words) for rows in s.buckets.rows}
    results = _shardings((s.empty_rows, s.kv, s.work, masks))
    return Program("empty", _make_empty, (s.rows, s.kv, s.work, masks), (), donated=(), results=results)


def _make_empty(
    rows: RowShape, kv: tuple[jax.ShapeDtypeStruct, ...], work: Work, masks: dict[int, jax.ShapeDtypeStruct]
) -> tuple[Rows, KV, Work, Masks]:
    zeros = functools.partial(jax.tree.map, lambda a: jnp.zeros(a.shape, a.dtype))
    return rowlib.empty(rows), zeros(kv), zeros(work), jax.tree.map(lambda a: jnp.full(a.shape, -1, a.dtype), masks)


def _admit(s: Shapes) -> Program:
    packed = rowlib.pack_admissions([], s.rows.rows)
    return _rows_program(s, "admit", rowlib.admit, _ints(s, *packed.shape))


def _limit(s: Shapes) -> Program:
    limits = s.empty_rows.limits
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=a.sharding), limits)
    return _rows_program(s, "limit", rowlib.limit, _ints(s), one)


def _restore(s: Shapes) -> Program:
    pages = _ints(s, len(s.kv), rowlib.RESTORED // s.step.page)
    return _rows_program(s, "restore", rowlib.restore, _ints(s, 3), _ints(s, rowlib.RESTORED), pages)


def _rows_program(s: Shapes, name: str, run: Callable[..., Rows], *args: object) -> Program:
    rows = s.empty_rows
    return Program(name, run, (), (rows, *args), donated=(0,), results=_shardings(rows))


def _ints(s: Shapes, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=meshes.replicated(s.mesh))


def _shardings(tree: object) -> object:
    return jax.tree.map(lambda a: a.sharding, tree)


def state_bytes(s: Shapes) -> int:
    """Rows, workspace and the masks that allow everything, on one device."""
    masks = [_ints(s, rows, s.rows.words) for rows in s.buckets.rows]
    return nbytes(tuple(jax.tree.leaves((s.empty_rows, s.work, masks))))


def nbytes(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> int:
    """Of arrays of these shapes, on one device."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in shapes)
