"""Llama: pre-norm decoder with grouped-query attention, rotary positions and a gated mlp. Biases on request.

Reference: "LLaMA: Open and Efficient Foundation Language Models" and "The Llama 3 Herd of Models".
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.layers import stack
from jaxserve.layers.linear import Linear, Vocabulary, qkv_linear, split_qkv
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import RMSNorm
from jaxserve.layers.rope import rotate
from jaxserve.layers.stack import Attend, Step
from jaxserve.models import names
from jaxserve.models.config import DecoderConfig, cache_groups
from jaxserve.weights.leaf import Source

__all__ = ["Llama", "cache_groups", "tensors"]


class Attention(nnx.Module):
    def __init__(self, c: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        sizes = (c.embed, c.heads, c.kv_heads, c.head_dim)
        self.qkv = qkv_linear(*sizes, bias=c.attention_bias, rngs=rngs, dtype=dtype)
        self.o = Linear(
            c.heads * c.head_dim, (c.embed,), ("embed", "heads"), bias=c.attention_bias, rngs=rngs, dtype=dtype
        )
        self.rope, self.head_dim, self.window = c.rope, c.head_dim, window

    def __call__(self, x: Float[Array, "T D"], step: Step, attend: Attend) -> Float[Array, "T D"]:
        q, k, v = split_qkv(self.qkv(x), self.head_dim)
        cos_sin = self.rope.cos_sin(step)
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        y = attend(q, k, v, window=self.window, scale=self.head_dim**-0.5)
        return self.o(y.reshape(len(x), -1))


class Block(nnx.Module):
    def __init__(self, c: DecoderConfig, window: int | None, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        self.group = c.group_windows.index(window)
        self.norm1, self.norm2 = RMSNorm(c.embed, c.eps), RMSNorm(c.embed, c.eps)
        self.attn = Attention(c, window, rngs=rngs, dtype=dtype)
        self.mlp = GatedMLP(c.embed, c.mlp, bias=c.mlp_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "T D"], step: Step, attend: Attend) -> Float[Array, "T D"]:
        x = x + self.attn(self.norm1(x), step, attend)
        return x + self.mlp(self.norm2(x))


class Llama(nnx.Module):
    def __init__(self, c: DecoderConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.float32) -> None:
        def block(window: int | None, keys: nnx.Rngs) -> Block:
            return Block(c, window, rngs=keys, dtype=dtype)

        self.embed = Vocabulary(c.vocab, c.padded_vocab, c.embed, rngs=rngs, dtype=dtype)
        self.segments = stack.segments(c.windows, block, rngs)
        self.norm = RMSNorm(c.embed, c.eps)
        self.head = None if c.tie else Vocabulary(c.vocab, c.padded_vocab, c.embed, rngs=rngs, dtype=dtype)

    def embed_tokens(self, ids: Int[Array, " T"]) -> Float[Array, "T D"]:
        return self.embed.embed(ids)

    def finish(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return self.norm(x)

    def logits(self, hidden: Float[Array, "T D"]) -> Float[Array, "T V"]:
        return (self.head or self.embed).scores(hidden)


def tensors(c: DecoderConfig) -> list[Source]:
    """Where every leaf comes from in a checkpoint with Hugging Face names."""
    block = [
        names.copied(".norm1.g", "input_layernorm.weight"),
        *names.qkv(c, ".attn.qkv", "self_attn", bias=c.attention_bias),
        *names.linear(".attn.o", "self_attn.o_proj", bias=c.attention_bias),
        names.copied(".norm2.g", "post_attention_layernorm.weight"),
        *names.gate_up(".mlp.gate_up", "mlp", bias=c.mlp_bias),
        *names.linear(".mlp.down", "mlp.down_proj", bias=c.mlp_bias),
    ]
    return names.decoder(c, block)
