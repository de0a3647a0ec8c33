"""Tiny models with unequal layers, for tests of whoever loops over layers, and the plain loop to compare them with.

`alternating`: two kinds of block in turn, with different mlp widths, windows and cache groups; one segment.
`first_dense`: one block of one kind, then several of another; two segments, one cache group.
`scanned_windows`: equal blocks whose window is scanned data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers import dense, stack
from jaxserve.layers.linear import Linear, Vocabulary, qkv_linear, split_qkv
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import Rope, rotate
from jaxserve.layers.stack import Attend, Segment, Step
from jaxserve.models.config import CacheGroup

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM = 53, 16, 4, 2, 8
ROPE = Rope((1.0, 0.3, 0.1, 0.03))


@dataclass(frozen=True)
class Kind:
    """What a block is made from."""

    mlp: int
    window: int | None = None
    group: int = 0


class ToyBlock(nnx.Module):
    """With `data` (i32[]) its window is that, not its own."""

    def __init__(self, kind: Kind, rngs: nnx.Rngs) -> None:
        keys = {"rngs": rngs, "dtype": jnp.float32}
        self.group, self.window = kind.group, kind.window
        self.qkv = qkv_linear(EMBED, HEADS, KV_HEADS, HEAD_DIM, **keys)
        self.o = Linear(HEADS * HEAD_DIM, (EMBED,), ("embed", "heads"), **keys)
        self.norm, self.mlp = RMSNorm(EMBED, 1e-6), GatedMLP(EMBED, kind.mlp, **keys)

    def __call__(
        self, x: Float[Array, "T D"], step: Step, attend: Attend, data: Int[Array, ""] | None = None
    ) -> Float[Array, "T D"]:
        q, k, v = split_qkv(self.qkv(x), HEAD_DIM)
        turn = ROPE.cos_sin(step)
        window = self.window if data is None else data
        y = attend(rotate(q, turn), rotate(k, turn), v, window=window, scale=HEAD_DIM**-0.5)
        x = x + self.o(y.reshape(len(x), -1))
        return x + self.mlp(self.norm(x))


class Toy(nnx.Module):
    def __init__(self, kinds: tuple[Kind, ...], seed: int) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = Vocabulary(VOCAB, VOCAB, EMBED, rngs=rngs, dtype=jnp.float32)
        self.segments = stack.segments(kinds, ToyBlock, rngs)
        self.norm = RMSNorm(EMBED, 1e-6)

    def embed_tokens(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embed.embed(ids)

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.norm(x)

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        return self.embed.scores(hidden)


FULL, LOCAL = Kind(mlp=24), Kind(mlp=40, window=5, group=1)


def alternating() -> tuple[Toy, list[CacheGroup]]:
    return Toy((FULL, LOCAL) * 3, seed=1), [
        CacheGroup(3, KV_HEADS, HEAD_DIM, None),
        CacheGroup(3, KV_HEADS, HEAD_DIM, LOCAL.window),
    ]


def first_dense() -> tuple[Toy, list[CacheGroup]]:
    return Toy((FULL, *(Kind(mlp=32),) * 4), seed=2), [CacheGroup(5, KV_HEADS, HEAD_DIM, None)]


def scanned_windows() -> tuple[Toy, list[CacheGroup]]:
    toy = Toy((FULL,) * 4, seed=3)
    windows = jnp.array([3, 1000, 1, 7], jnp.int32)
    toy.segments = nnx.data((replace(toy.segments[0], data=(windows,)),))
    return toy, [CacheGroup(4, KV_HEADS, HEAD_DIM, None)]


TOYS = {make.__name__: make for make in (alternating, first_dense, scanned_windows)}


def unrolled(toy: Toy, ids: Int[Array, " L"]) -> Float[Array, "L V"]:
    """Float32 logits of a whole sequence, layer after layer, with no scan and no cache."""
    tokens = len(ids)
    step = dense.OneSequence(jnp.arange(tokens), jnp.full(tokens, tokens))
    x = toy.embed_tokens(ids)
    for segment in toy.segments:
        for r in range(jax.tree.leaves(segment)[0].shape[0]):
            one: Segment = jax.tree.map(lambda leaf, r=r: leaf[r], segment)
            for b, block in enumerate(one.blocks):
                x = block(x, step, dense.attend, *(() if one.data is None else (one.data[b],)))
    return toy.logits(toy.finish(x))
