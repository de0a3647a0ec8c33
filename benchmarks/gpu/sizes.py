"""What is measured: the shapes of the model, the requests, and the least that a step must move and compute.

Two sizes: `FULL` for a GPU (Llama-3.1-8B), `TOY` for a CPU, where the same code runs and no figure is worth telling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.gpu.record import Piece

BF16 = 2
"""Bytes."""


@dataclass(frozen=True)
class Model:
    """A Llama with random weights in bfloat16; D, N, K, H, F and V of the glossary."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    positions: int

    def config(self) -> dict[str, object]:
        """As in Hugging Face's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_size": self.embed,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rope_theta": 500000.0,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
        }

    @property
    def layer_weights(self) -> int:
        """In the matrices of all layers."""
        attention = self.embed * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.embed * self.mlp)

    @property
    def head_weights(self) -> int:
        return self.embed * self.vocab

    @property
    def kv_token_bytes(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * BF16

    def step(self, *, tokens: int, seen: float, read: float, emitting: int) -> Piece:
        """The least that a step of `tokens` tokens must do.

        `seen`: keys that all its queries together attend to; `read`: tokens of KV that must be read for it, once.
        """
        weights = self.layer_weights + self.head_weights
        attention = 4 * seen * self.heads * self.head_dim * self.layers
        return Piece(
            bytes=weights * BF16 + (read + tokens) * self.kv_token_bytes,
            flops=2 * (self.layer_weights * tokens + self.head_weights * emitting) + attention,
        )

    def decoding(self, batch: int, context: float) -> Piece:
        """A step in which `batch` sequences of `context` tokens get one more."""
        return self.step(tokens=batch, seen=batch * context, read=batch * context, emitting=batch)

    def entering(self, prompts: int, length: int) -> Piece:
        """`prompts` prompts of `length` tokens."""
        return self.step(tokens=prompts * length, seen=prompts * length * length / 2, read=0, emitting=prompts)


@dataclass(frozen=True)
class Crowd:
    """Requests that come all at once."""

    clients: int
    prompt: int
    answer: int


@dataclass(frozen=True)
class Size:
    name: str
    model: Model
    batches: tuple[int, ...]
    context: int
    steps: int
    """Decode steps that are timed."""
    traced_steps: int
    prefill: int
    repeats: int
    crowd: Crowd
    reference_tokens: int
    """Of an answer that transformers gives."""
    copied: int
    """Bytes of the array that is copied to find the bandwidth."""
    square: int
    """Side of the matrices that are multiplied to find the rate."""
    engine: Mapping[str, object]
    """Options of the engine that is measured."""
    variant_batches: tuple[int, ...]
    variant_engine: Mapping[str, object] = field(default_factory=dict[str, object])
    """Of the engines that are compared with each other: few programs, so that each starts fast."""


FULL = Size(
    name="full",
    model=Model(layers=32, embed=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, vocab=128256, positions=131072),
    batches=(1, 32, 128),
    context=1024,
    steps=64,
    traced_steps=24,
    prefill=2048,
    repeats=5,
    crowd=Crowd(clients=128, prompt=1024, answer=1024),
    reference_tokens=48,
    copied=2**33,
    square=8192,
    engine={"max_model_len": 8192},
    variant_batches=(1, 32),
    variant_engine={"max_model_len": 2048, "max_num_seqs": 32, "token_buckets": (1, 32, 2048)},
)

TOY = Size(
    name="toy",
    model=Model(layers=2, embed=512, heads=8, kv_heads=4, head_dim=64, mlp=1024, vocab=256, positions=256),
    batches=(1, 2),
    context=24,
    steps=6,
    traced_steps=4,
    prefill=32,
    repeats=2,
    crowd=Crowd(clients=3, prompt=16, answer=8),
    reference_tokens=4,
    copied=2**20,
    square=128,
    engine={"max_num_seqs": 4, "token_buckets": (32,), "num_pages": 80},
    variant_batches=(2,),
    variant_engine={"max_num_seqs": 4, "token_buckets": (32,), "num_pages": 80},
)
