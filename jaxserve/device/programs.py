"""The list of programs an engine runs, compiled before it starts: another shape raises, nothing compiles later.

Owns the buckets and the executables. Knows shapes only: no weights, no memory that is in use.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.device import mesh as meshes
from jaxserve.device import rows as rowlib
from jaxserve.device import step
from jaxserve.device.rows import Rows, RowShape
from jaxserve.device.step import KV, Sampled, StepShape, Work
from jaxserve.sampling.params import RowLimits

SCORED = 64
"""Prompt tokens that one `score` call takes."""

Executable = jax.stages.Compiled
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

    forward: Mapping[int, Forward]
    sample: Mapping[tuple[int, bool], Sample]
    score: Score
    admit: Admit
    limit: Limit
    restore: Restore


def compile_all(shapes: Shapes, *, options: dict[str, str | bool] | None = None, progress: Progress) -> Programs:
    """Compiles every program, two at a time; `options` are XLA's, of these programs only."""
    jobs = _jobs(shapes)
    done = 0

    def one(job: tuple[str, Callable[[], jax.stages.Lowered]]) -> Executable:
        nonlocal done
        compiled = job[1]().compile(compiler_options=options)
        done += 1
        progress(f"compiling {job[0]}", done, len(jobs))
        return compiled

    with ThreadPoolExecutor(2) as pool:
        made = dict(zip((name for name, _ in jobs), pool.map(one, jobs), strict=True))
    return Programs(
        forward={t: made[f"forward {t}"] for t in shapes.buckets.tokens},
        sample={(r, full): made[_sample_name(r, full)] for r in shapes.buckets.rows for full in (False, True)},
        score=made["score"],
        admit=made["admit"],
        limit=made["limit"],
        restore=made["restore"],
    )


def temporary_bytes(shapes: Shapes, options: dict[str, str | bool] | None = None) -> int:
    """What the largest programs need beside their arguments and results, by the compiler's own count, per device."""
    largest = (
        _lower_forward(shapes, shapes.buckets.tokens[-1]),
        _lower_sample(shapes, shapes.buckets.rows[-1], True),
        _lower_score(shapes),
    )
    found = [lowered.compile(compiler_options=options).memory_analysis() for lowered in largest]
    return max(a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in found if a is not None)


def _jobs(shapes: Shapes) -> list[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """The longest first, so that two threads end together."""
    jobs: list[tuple[str, Callable[[], jax.stages.Lowered]]] = []
    for t in reversed(shapes.buckets.tokens):
        jobs.append((f"forward {t}", functools.partial(_lower_forward, shapes, t)))
    for r in reversed(shapes.buckets.rows):
        for full in (True, False):
            jobs.append((_sample_name(r, full), functools.partial(_lower_sample, shapes, r, full)))
    rest = {"score": _lower_score, "admit": _lower_admit, "limit": _lower_limit, "restore": _lower_restore}
    return jobs + [(name, functools.partial(lower, shapes)) for name, lower in rest.items()]


def _sample_name(rows: int, full: bool) -> str:
    return f"sample {rows}" + " full" * full


def _lower_forward(s: Shapes, tokens: int) -> jax.stages.Lowered:
    chunks = s.chunks(tokens)
    run = functools.partial(step.forward, s.step, tokens, chunks)
    size = step.upload_size(tokens, chunks, s.entries(tokens))
    out = (_shardings(_rows(s)), _shardings(s.kv), _shardings(s.work))
    return jax.jit(run, donate_argnums=(1, 2, 3), out_shardings=out).lower(
        list(s.leaves), _rows(s), s.kv, s.work, _ints(s, size)
    )


def _lower_sample(s: Shapes, rows: int, full: bool) -> jax.stages.Lowered:
    run = functools.partial(step.sample, s.step, rows)
    rep = meshes.replicated(s.mesh)
    masks = [_ints(s, rows, s.rows.words)] if full else []
    return jax.jit(run, donate_argnums=(1,), out_shardings=(_shardings(_rows(s)), rep)).lower(
        list(s.leaves), _rows(s), s.work.picked, _ints(s, rows + len(step.WANTS)), *masks
    )


def _lower_score(s: Shapes) -> jax.stages.Lowered:
    run = functools.partial(step.score, s.step)
    return jax.jit(run, out_shardings=meshes.replicated(s.mesh)).lower(
        list(s.leaves), s.work.hidden, _ints(s, SCORED), _ints(s, SCORED)
    )


def _lower_admit(s: Shapes) -> jax.stages.Lowered:
    packed = rowlib.pack_admissions([], s.rows.rows)
    return _rows_program(s, rowlib.admit).lower(_rows(s), _ints(s, *packed.shape))


def _lower_limit(s: Shapes) -> jax.stages.Lowered:
    limits = _rows(s).limits
    one = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype, sharding=a.sharding), limits)
    assert isinstance(one, RowLimits)
    return _rows_program(s, rowlib.limit).lower(_rows(s), _ints(s), one)


def _lower_restore(s: Shapes) -> jax.stages.Lowered:
    pages = _ints(s, len(s.kv), rowlib.RESTORED // s.step.page)
    return _rows_program(s, rowlib.restore).lower(_rows(s), _ints(s, 3), _ints(s, rowlib.RESTORED), pages)


def _rows_program(s: Shapes, run: Callable[..., Rows]) -> jax.stages.Wrapped:
    return jax.jit(run, donate_argnums=(0,), out_shardings=_shardings(_rows(s)))


def _rows(s: Shapes) -> Rows:
    return jax.tree.map(
        lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place),
        jax.eval_shape(functools.partial(rowlib.empty, s.rows)),
        row_shardings(s),
    )


def row_shardings(s: Shapes) -> Rows:
    """A `Rows` of shardings: what has a column per token is split like the logits, the rest is on every device."""
    shapes = jax.eval_shape(functools.partial(rowlib.empty, s.rows))
    everywhere = jax.tree.map(lambda _: meshes.replicated(s.mesh), shapes)
    columns = meshes.split_columns(s.mesh)
    return dataclasses.replace(everywhere, counts=columns, in_prompt=columns)


def _ints(s: Shapes, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=meshes.replicated(s.mesh))


def _shardings(tree: Rows | KV | Work | tuple[jax.ShapeDtypeStruct, ...]) -> object:
    return jax.tree.map(lambda a: a.sharding, tree)


def state_bytes(s: Shapes) -> int:
    """Rows, workspace and the masks that allow everything, on one device."""
    masks = [_ints(s, rows, s.rows.words) for rows in s.buckets.rows]
    return nbytes(tuple(jax.tree.leaves((_rows(s), s.work, masks))))


def nbytes(shapes: tuple[jax.ShapeDtypeStruct, ...]) -> int:
    """Of arrays of these shapes, on one device."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in shapes)
