"""From Hugging Face tensors to leaves, for decoders that spell their names like Llama.

The numpy side of the layouts in `layers/linear.py` and `layers/mlp.py`. A model file lists the sources of one block,
with paths and names that begin inside the block; `decoder` adds the rest. "{layer}" is the model's layer number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from jaxserve.layers.stack import runs
from jaxserve.models.config import DecoderConfig
from jaxserve.weights.leaf import Source


def decoder(c: DecoderConfig, block: Sequence[Source]) -> list[Source]:
    """All sources of a model: embedding, final norm, head unless tied, and those of `block` for every layer."""
    whole = [
        Source(".embed.w", ("model.embed_tokens.weight",), _pad_vocabulary(c)),
        copied(".norm.g", "model.norm.weight"),
    ]
    head = [] if c.tie else [Source(".head.w", ("lm_head.weight",), _pad_vocabulary(c))]
    return whole + head + _in_every_layer(c, block)


def copied(path: str, name: str) -> Source:
    """A leaf that is the tensor."""
    return Source(path, (name,), np.asarray)


def linear(path: str, name: str, *, bias: bool = False) -> list[Source]:
    """w [out, D] and perhaps b of `layers.linear.Linear`."""
    biases = [copied(f"{path}.b", f"{name}.bias")] if bias else []
    return [copied(f"{path}.w", f"{name}.weight"), *biases]


def qkv(c: DecoderConfig, path: str, name: str, *, bias: bool = False) -> list[Source]:
    """w [K, (G+2)*H, D] and perhaps b [K, (G+2)*H]; `name` is the attention's, q_proj and so on are in it."""
    parts = [f"{name}.{p}_proj" for p in "qkv"]

    def fuse(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return fuse_qkv(c, q, k, v)

    biases = [Source(f"{path}.b", tuple(f"{p}.bias" for p in parts), fuse)] if bias else []
    return [Source(f"{path}.w", tuple(f"{p}.weight" for p in parts), fuse), *biases]


def gate_up(path: str, name: str, *, bias: bool = False) -> list[Source]:
    """w [2, F, D] and perhaps b [2, F]; `name` is the mlp's, gate_proj and up_proj are in it."""
    parts = [f"{name}.{p}_proj" for p in ("gate", "up")]

    def fuse(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
        return np.stack([gate, up])

    biases = [Source(f"{path}.b", tuple(f"{p}.bias" for p in parts), fuse)] if bias else []
    return [Source(f"{path}.w", tuple(f"{p}.weight" for p in parts), fuse), *biases]


def fuse_qkv(c: DecoderConfig, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """[N*H, ...], [K0*H, ...], [K0*H, ...] to [K, (G+2)*H, ...]: a checkpoint's K0 KV heads repeated to K in place.

    Query heads stay in order: those that read KV head k of the checkpoint are next to each other, as are its copies.
    """
    rest = q.shape[1:]
    q = q.reshape(c.kv_heads, -1, *rest)
    k, v = (
        np.repeat(x.reshape(c.checkpoint_kv_heads, c.head_dim, *rest), c.kv_heads // c.checkpoint_kv_heads, axis=0)
        for x in (k, v)
    )
    return np.concatenate([q, k, v], axis=1)


def _pad_vocabulary(c: DecoderConfig) -> Callable[..., np.ndarray]:
    return lambda x: np.pad(x, ((0, c.padded_vocab - c.vocab), (0, 0))) if c.padded_vocab > c.vocab else x


def _in_every_layer(c: DecoderConfig, block: Sequence[Source]) -> list[Source]:
    return [
        replace(
            source,
            path=f".segments[{s}].blocks[{b}]{source.path}",
            names=tuple(f"model.layers.{{layer}}.{name}" for name in source.names),
            layers=run.layers(b),
        )
        for s, run in enumerate(runs(c.windows))
        for b in range(len(run.kinds))
        for source in block
    ]
