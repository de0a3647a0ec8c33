"""What a model is to whoever runs it: segments of repeated blocks, the contract of one block, and the one loop.

A model builds its segments here and never loops over them: `run_layers` does. Nothing here knows a model by name.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.weights.leaf import Stacked

MAX_GROUP = 8
"""Longest group of unequal layers that is looked for: a longer one costs more to compile than it saves."""


class Step(Protocol):
    """What a block may know of the tokens it is given. Both arrays have one entry a token."""

    @property
    def positions(self) -> Int[Array, " T"]:
        """The token's place in its sequence, from 0."""
        ...

    @property
    def prompt_len(self) -> Int[Array, " T"]:
        """Length of the prompt of the token's sequence. Read only by models with dynamic rope."""
        ...


class Attend(Protocol):
    """Stores k and v of these tokens, then attends: each token over its sequence up to itself.

    `window` w: a token sees itself and the w - 1 tokens before it; None: all of them. `scale` multiplies q . k.
    """

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        *,
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> Float[Array, "T N H"]: ...


class Block(Protocol):
    """One layer. `group` is the index of its cache in the model's `cache_groups`.

    It is called as `block(x, step, attend)`, or `block(x, step, attend, data)` in a segment that has data. It calls
    `attend` once.
    """

    group: int
    __call__: Callable[..., Float[Array, "T D"]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segment:
    """A group of blocks, one after the other, repeated. Layer r * len(blocks) + b is repeat r of block b."""

    blocks: tuple[Block, ...]
    """Every leaf stacked [repeat, ...]."""
    data: tuple[object, ...] | None = None
    """What differs between repeats and is no weight, one pytree a block, leaves [repeat, ...]."""


class Decoder(Protocol):
    """A language model as its caller sees it."""

    segments: Sequence[Segment]

    def embed_tokens(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]: ...

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """What follows the last block: the final norm."""
        ...

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """Float32, V the padded vocabulary; -inf where there is no token."""
        ...


class CachedAttend(Protocol):
    """`Attend` over a cache that is passed through: `layer` is the layer's number within its cache group `group`."""

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: jax.Array,
        layer: Int[Array, ""],
        group: int,
        *,
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> tuple[Float[Array, "T N H"], jax.Array]: ...


def run_layers(
    segments: Sequence[Segment],
    x: Float[Array, "T D"],
    caches: tuple[jax.Array, ...],
    step: Step,
    attend: CachedAttend,
) -> tuple[Float[Array, "T D"], tuple[jax.Array, ...]]:
    """All blocks of a model, one scan a segment. The caches (one a group) are carried, so they change in place."""
    done = [0] * len(caches)
    for segment in segments:
        groups = [block.group for block in segment.blocks]
        repeats = jax.tree.leaves(segment)[0].shape[0]
        leaves, structure = jax.tree.flatten(segment, is_leaf=lambda leaf: isinstance(leaf, Stacked))
        whole = [leaf if isinstance(leaf, Stacked) else None for leaf in leaves]
        split = [None if isinstance(leaf, Stacked) else leaf for leaf in leaves]

        def repeat(
            carry: tuple[jax.Array, tuple[jax.Array, ...]],
            item: tuple[list[jax.Array | None], jax.Array],
            groups: list[int] = groups,
            done: tuple[int, ...] = tuple(done),
            whole: list[Stacked | None] = whole,
            structure: jax.tree_util.PyTreeDef = structure,
        ) -> tuple[tuple[jax.Array, tuple[jax.Array, ...]], None]:
            x, caches = carry
            slices, r = item
            own = [own if stack is None else stack.at_layer(r) for own, stack in zip(slices, whole, strict=True)]
            one: Segment = jax.tree.unflatten(structure, own)
            kept = list(caches)
            for i, block in enumerate(one.blocks):
                g = groups[i]
                layer = done[g] + r * groups.count(g) + groups[:i].count(g)
                cell = _Cell(kept[g], layer, g, attend)
                data = () if one.data is None else (one.data[i],)
                x = block(x, step, cell, *data)
                kept[g] = cell.cache
            return (x, tuple(kept)), None

        (x, caches), _ = jax.lax.scan(repeat, (x, caches), (split, jax.numpy.arange(repeats)))
        for g in groups:
            done[g] += repeats
    return x, caches


class _Cell:
    """`Attend` for one block: hands the group's cache through a call that the block sees as a plain function."""

    def __init__(self, cache: jax.Array, layer: Int[Array, ""], group: int, attend: CachedAttend) -> None:
        self.cache = cache
        self._layer, self._group, self._attend = layer, group, attend

    def __call__(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        *,
        window: int | Int[Array, ""] | None,
        scale: float,
    ) -> Float[Array, "T N H"]:
        out, self.cache = self._attend(q, k, v, self.cache, self._layer, self._group, window=window, scale=scale)
        return out


@dataclass(frozen=True)
class Run[Kind: Hashable]:
    """Layers first .. first + len(kinds) * times - 1 of a model: a group of layers of these kinds, `times` over."""

    kinds: tuple[Kind, ...]
    first: int
    times: int

    def layers(self, b: int) -> tuple[int, ...]:
        """The model's layer numbers of the group's b-th block, in stack order."""
        return tuple(self.first + r * len(self.kinds) + b for r in range(self.times))


def runs[Kind: Hashable](kinds: Sequence[Kind]) -> tuple[Run[Kind], ...]:
    """Cuts a model into segments: layers of one kind in a row, or a short pattern of kinds that repeats.

    Greedy: at each layer the group that covers most layers, the shortest of those that cover as many; a group
    that would not repeat is not one.
    """
    found, at = [], 0
    while at < len(kinds):
        rest = kinds[at:]
        sizes = [n for n in range(1, MAX_GROUP + 1) if n == 1 or _repeats(rest, n) > 1]
        size = max(sizes, key=lambda n: (_repeats(rest, n) * n, -n))
        found.append(Run(tuple(rest[:size]), at, _repeats(rest, size)))
        at += size * found[-1].times
    return tuple(found)


def _repeats[Kind: Hashable](kinds: Sequence[Kind], size: int) -> int:
    """How often the first `size` kinds follow each other from the start."""
    times = 1
    while tuple(kinds[times * size : (times + 1) * size]) == tuple(kinds[:size]):
        times += 1
    return times


def stacked(make_block: Callable[[nnx.Rngs], Block], repeat: int, rngs: nnx.Rngs) -> Block:
    """`repeat` blocks, each from its own key, as one whose leaves are stacked [repeat, ...]."""
    return jax.vmap(lambda key: make_block(nnx.Rngs(key)))(jax.random.split(rngs.params(), repeat))


def segments[Kind: Hashable](
    kinds: Sequence[Kind], make_block: Callable[[Kind, nnx.Rngs], Block], rngs: nnx.Rngs
) -> tuple[Segment, ...]:
    """The segments of a model whose layer i is a block of kind `kinds[i]`. Assign them to the model as they are."""
    made = tuple(
        Segment(tuple(stacked(lambda r, kind=kind: make_block(kind, r), run.times, rngs) for kind in run.kinds))
        for run in runs(kinds)
    )
    return nnx.data(made)
