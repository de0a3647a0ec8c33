"""The programs of a step, as functions of arrays: `forward`, `sample`, `score`.

Token ids, positions and cache slots are derived here from the rows; the host sends counts. Everything has a fixed
shape. Owns no memory: pool, rows and workspace are donated by the executor and returned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxserve.device import rows as rowlib
from jaxserve.device.rows import Rows
from jaxserve.layers import attention
from jaxserve.layers.stack import Decoder, run_layers
from jaxserve.native import Kernels
from jaxserve.sampling import sample as sampling
from jaxserve.sampling.params import RowLimits, RowText, Wants
from pallas_kernels import paged_attention

AXIS = "tensor"
LEAST = 2
"""Tokens or rows that a program computes at least. XLA takes one alone for a vector or a slice: it widens whole weights
to multiply them, and gathers what is split over devices to look one row up."""

KV = tuple[Float[Array, "layers*pages 2 K page H"], ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Work:
    """What `forward` leaves for the programs after it; donated, so it changes in place."""

    hidden: Float[Array, "Tmax D"]
    picked: Float[Array, "S D"]
    """The last hidden state of each chunk."""

    @staticmethod
    def empty(tokens: int, rows: int, embed: int, dtype: jnp.dtype) -> Work:
        return Work(jnp.zeros((tokens, embed), dtype), jnp.zeros((rows, embed), dtype))


@dataclass(frozen=True)
class StepShape:
    """What does not change from step to step. `pages` per cache group, the scratch page included."""

    model: jax.tree_util.PyTreeDef
    page: int
    pages: tuple[int, ...]
    vocab: int
    top: int
    """Most likely tokens reported beside each logprob."""
    uniform: bool
    mesh: Mesh
    kernels: Kernels | None = None
    """Native ones, on a CPU."""
    unit: int | None = None
    """Tokens in a unit of the Pallas kernel, where it computes attention."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Flat:
    """The step's T tokens, flat."""

    positions: Int[Array, " T"]
    prompt_len: Int[Array, " T"]


def upload_size(tokens: int, chunks: int, entries: int) -> int:
    """Length of `forward`'s packed buffer: ids, then row and count of each chunk, then page entries."""
    return tokens + 2 * chunks + 4 * entries


def forward(
    shape: StepShape,
    tokens: int,
    chunks: int,
    leaves: list[jax.Array],
    rows: Rows,
    kv: KV,
    work: Work,
    packed: Int[Array, " N"],
) -> tuple[Rows, KV, Work]:
    """Computes `tokens` flat tokens of up to `chunks` chunks: writes their KV, leaves their hidden states in `work`.

    `packed`: ids i32[T] (-1: the row's table holds the token; anything else is written there first), row i32[S],
    count i32[S], then page entries (group, row, index, page) i32[E, 4]. Padding has the spare row and count 0; its
    hidden states are zeros, which native products skip.
    """
    model: Decoder = jax.tree.unflatten(shape.model, leaves)
    given, row_of, counts, entries = _unpack(packed, tokens, chunks)
    width = max(tokens, LEAST)
    given = jnp.pad(given, (0, width - tokens), constant_values=-1)
    rows = dataclasses.replace(
        rows,
        pages=tuple(
            table.at[jnp.where(entries[:, 0] == g, entries[:, 1], table.shape[0]), entries[:, 2]].set(
                entries[:, 3], mode="drop"
            )
            for g, table in enumerate(rows.pages)
        ),
    )
    ends = jnp.cumsum(counts)
    starts = ends - counts
    t = jnp.arange(width)
    chunk = jnp.minimum(jnp.searchsorted(ends, t, side="right", method="compare_all"), chunks - 1)
    live = t < ends[-1]
    row = row_of[chunk]
    position = rows.computed[row] + t - starts[chunk]
    in_table = jnp.where(live, position, rows.tokens.shape[1])
    known = live & (given >= 0)
    rows = dataclasses.replace(
        rows, tokens=rows.tokens.at[row, jnp.where(known, in_table, rows.tokens.shape[1])].set(given, mode="drop")
    )
    rows = rowlib.note_tokens(rows, row, position, jnp.maximum(given, 0), known)
    ids = jnp.where(known, given, rows.tokens.at[row, in_table].get(mode="fill", fill_value=0))
    lengths = rows.computed[row_of] + counts
    batches = [
        _batch(shape, rows, g, row_of, row, position, live, starts, counts, lengths, chunk) for g in range(len(kv))
    ]
    x, kv = run_layers(
        model.segments,
        jnp.where(live[:, None], model.embed_tokens(ids), 0),
        kv,
        _Flat(position, rows.prompt_len[row]),
        _Attend(shape, batches),
    )
    x = model.finish(x)
    rows = dataclasses.replace(rows, computed=rows.computed.at[row_of].add(counts))
    picked = jnp.where((counts > 0)[:, None], x[jnp.maximum(ends - 1, 0)], 0)
    return (
        rows,
        kv,
        Work(
            hidden=jax.lax.dynamic_update_slice(work.hidden, x[:tokens].astype(work.hidden.dtype), (0, 0)),
            picked=jax.lax.dynamic_update_slice(work.picked, picked.astype(work.picked.dtype), (0, 0)),
        ),
    )


def _unpack(
    packed: Int[Array, " N"], tokens: int, chunks: int
) -> tuple[Int[Array, " T"], Int[Array, " S"], Int[Array, " S"], Int[Array, "E 4"]]:
    ids, row, count, entries = jnp.split(packed, (tokens, tokens + chunks, tokens + 2 * chunks))
    return ids, row, count, entries.reshape(-1, 4)


def _batch(
    shape: StepShape,
    rows: Rows,
    group: int,
    row_of: Int[Array, " S"],
    row: Int[Array, " T"],
    position: Int[Array, " T"],
    live: Bool[Array, " T"],
    starts: Int[Array, " S"],
    counts: Int[Array, " S"],
    lengths: Int[Array, " S"],
    chunk: Int[Array, " T"],
) -> attention.Batch:
    """Slots are counted from the layer's first page on; a dead token's slot lies beyond any layer."""
    table = rows.pages[group]
    page = table.at[row, position // shape.page].get(mode="clip")
    slot = jnp.where(live, page * shape.page + position % shape.page, jnp.iinfo(jnp.int32).max)
    table = table[row_of]
    units = None
    if shape.unit is not None:
        longest = table.shape[1] * shape.page
        units = paged_attention.schedule(
            starts, counts, lengths, tokens=len(position), longest=longest, per_unit=shape.unit
        )
    return attention.Batch(starts, counts, lengths, table, slot, chunk, jnp.where(live, position, -1), units)


class _Attend:
    """`stack.CachedAttend` over the paged pool; split over the mesh by KV heads."""

    def __init__(self, shape: StepShape, batches: list[attention.Batch]) -> None:
        self._shape, self._batches = shape, batches

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: Float[Array, "pages 2 K page H"],
        layer: Int[Array, ""],
        group: int,
        *,
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], Float[Array, "pages 2 K page H"]]:
        shape = self._shape
        first = layer * shape.pages[group]
        window = None if window is None else jnp.asarray(window, jnp.int32)

        def local(q, k, v, cache, batch, first, window):  # noqa: ANN001, ANN202 - the heads of one device
            options = {"window": window, "scale": scale, "uniform": shape.uniform, "kernels": shape.kernels}
            return attention.attend(q, k, v, cache, batch, first, **options)

        if shape.mesh.size > 1:
            heads, pool = P(None, AXIS), P(None, None, AXIS)
            local = jax.shard_map(
                local,
                mesh=shape.mesh,
                in_specs=(heads, heads, heads, pool, P(), P(), P()),
                out_specs=(heads, pool),
                check_vma=False,
            )
        return local(q, k, v, cache, self._batches[group], first, window)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """What `sample` reports of its S rows. The scores are empty in its plain form."""

    tokens: Int[Array, " S"]
    logprob: Float[Array, " S"]
    rank: Int[Array, " S"]
    top_ids: Int[Array, "S k"]
    top_logprobs: Float[Array, "S k"]


WANTS = ("penalties", "bias", "bad_words", "truncation", "logprobs")
"""The order of the flags in `sample`'s upload."""


def sample(
    shape: StepShape,
    count: int,
    leaves: list[jax.Array],
    rows: Rows,
    picked: Float[Array, "S D"],
    packed: Int[Array, " N"],
    masks: Int[Array, "S W"] | None = None,
) -> tuple[Rows, Sampled]:
    """One token for each of the first `count` chunks, written into its row's table.

    `packed`: row i32[count] (the spare row: none), then the `WANTS` as 0 or 1. The plain form knows greedy and
    temperature only; the full one takes `masks` of what each chunk may say in this step.
    """
    if count < LEAST:
        spare = jnp.full(LEAST - count, rows.computed.shape[0] - 1, jnp.int32)
        packed = jnp.concatenate([packed[:count], spare, packed[count:]])
        masks = None if masks is None else jnp.pad(masks, ((0, LEAST - count), (0, 0)), constant_values=-1)
        picked = jnp.pad(picked[:count], ((0, LEAST - count), (0, 0)))
        rows, out = sample(shape, LEAST, leaves, rows, picked, packed, masks)
        return rows, jax.tree.map(lambda a: a[:count], out)
    model: Decoder = jax.tree.unflatten(shape.model, leaves)
    row, flags = packed[:count], packed[count:]
    logits = model.logits(picked[:count])
    params = jax.tree.map(lambda a: a[row], rows.params)
    position = rows.computed[row]
    if masks is not None:
        limits: RowLimits = jax.tree.map(lambda a: a[row], rows.limits)
        now = jax.lax.bitcast_convert_type(masks, jnp.uint32)
        got = sampling.full(
            logits,
            params,
            _text(rows, row, position),
            dataclasses.replace(limits, allow=limits.allow & now),
            Wants(**{name: flags[i] > 0 for i, name in enumerate(WANTS)}),
            vocab=shape.vocab,
            top=shape.top,
            columns=NamedSharding(shape.mesh, P(None, AXIS)) if shape.mesh.size > 1 else None,
        )
        out = Sampled(got.token, got.logprob, got.rank, got.top_ids, got.top_logprobs)
    else:
        token = sampling.plain(logits, params.temperature, params.seed, position, shape.vocab)
        none = jnp.zeros((0,), jnp.float32)
        out = Sampled(token, none, none.astype(jnp.int32), none.astype(jnp.int32)[None], none[None])
    said = rows.counts.at[row, out.tokens].get(mode="clip")
    rows = dataclasses.replace(
        rows,
        tokens=rows.tokens.at[row, position].set(out.tokens, mode="drop"),
        counts=rows.counts.at[row, out.tokens].add(said < jnp.iinfo(jnp.uint16).max, mode="drop"),
    )
    return rows, out


def _text(rows: Rows, row: Int[Array, " S"], position: Int[Array, " S"]) -> RowText:
    generated = position - rows.prompt_len[row]
    back = jnp.arange(rowlib.BANNED_TOKENS - 1, 0, -1)
    at = position[:, None] - back
    recent = rows.tokens.at[row[:, None], jnp.maximum(at, 0)].get(mode="clip")
    return RowText(
        position=position,
        generated=generated,
        counts=rows.counts[row],
        in_prompt=rows.in_prompt[row],
        recent=jnp.where(back <= generated[:, None], recent, -1),
    )


def score(
    shape: StepShape,
    leaves: list[jax.Array],
    hidden: Float[Array, "Tmax D"],
    at: Int[Array, " B"],
    targets: Int[Array, " B"],
) -> Sampled:
    """Log probabilities of `targets` after the step's flat tokens `at`."""
    model: Decoder = jax.tree.unflatten(shape.model, leaves)
    logits = model.logits(hidden[at])
    logprob, rank, top_ids, top_logprobs = sampling.score(logits, targets, vocab=shape.vocab, top=shape.top)
    return Sampled(targets, logprob, rank, top_ids, top_logprobs)
