"""What a decoder is: its sizes and options, read once from a Hugging Face config.json, and the caches it needs.

Owns the meaning of the config's fields. A field that would change the answer and is not served is refused by name
here, so that a model file may take what it finds. Knows no weights and no devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from jaxserve.layers.rope import Rope
from jaxserve.models import rope as rope_fields

Fields = Mapping[str, object]
"""The content of a config.json."""

VOCAB_GRAIN = 128
"""The vocabulary is padded to a multiple of this."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share one page table: each keeps K and V for the same tokens."""

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None
    """Every layer of the group sees only the last `window` tokens, so older pages may be dropped. None: keep all."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes and options of a dense decoder, for a number of tensor-parallel ways."""

    architecture: str
    embed: int
    layers: int
    heads: int
    kv_heads: int
    """As computed and cached: replicated to the ways if the checkpoint has fewer."""
    checkpoint_kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    """Token ids that exist."""
    padded_vocab: int
    """Rows of the embedding and the head: a multiple of the ways, and the same for every usual number of them."""
    eps: float
    rope: Rope
    max_position: int
    """Longest sequence the model is meant for."""
    windows: tuple[int | None, ...]
    """For each layer, how many tokens a token sees (itself included); None: all."""
    tie: bool
    """Tokens out are scored with the embedding of tokens in."""
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Fields, *, ways: int = 1, tied: bool) -> DecoderConfig:
        """`ways`: devices that share every layer. `tied`: the head is the embedding, which only the weights can tell.

        Raises:
            ValueError: a field is missing, wrong or not supported, or `ways` does not divide the model; the message
                names the field, or the ways that would do.
        """
        _refuse(config)
        architecture = architecture_of(config)
        embed, heads, mlp = (_size(config, f) for f in ("hidden_size", "num_attention_heads", "intermediate_size"))
        layers, vocab, positions = (
            _size(config, f) for f in ("num_hidden_layers", "vocab_size", "max_position_embeddings")
        )
        kv_heads = _size(config, "num_key_value_heads", heads)
        head_dim = _size(config, "head_dim", _HEAD_DIM.get(architecture, embed // heads))
        if heads % kv_heads:
            raise ValueError(f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}")
        check_ways(ways, heads=heads, kv_heads=kv_heads, mlp=mlp)
        return cls(
            architecture=architecture,
            embed=embed,
            layers=layers,
            heads=heads,
            kv_heads=max(kv_heads, ways),
            checkpoint_kv_heads=kv_heads,
            head_dim=head_dim,
            mlp=mlp,
            vocab=vocab,
            padded_vocab=_padded(vocab, ways),
            eps=_number(config, "rms_norm_eps", 1e-6),
            rope=rope_fields.from_hf(config, head_dim, positions),
            max_position=rope_fields.longest(config, positions),
            windows=_WINDOWS.get(architecture, _no_windows)(config, layers),
            tie=tied,
            attention_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
        )

    @property
    def group_windows(self) -> tuple[int | None, ...]:
        """The window of each cache group, in the order in which the layers first need them."""
        return tuple(dict.fromkeys(self.windows))


def _padded(vocab: int, ways: int) -> int:
    """Draws are laid out over the padded vocabulary, which does not change with the ways: seeds keep their answers."""
    grain = math.lcm(VOCAB_GRAIN, ways)
    return -(-vocab // grain) * grain


def cache_groups(c: DecoderConfig) -> list[CacheGroup]:
    """One group for each window: a layer with window w is in group `c.group_windows.index(w)`."""
    return [CacheGroup(c.windows.count(w), c.kv_heads, c.head_dim, w) for w in c.group_windows]


def architecture_of(config: Fields) -> str:
    """The architecture a config names first.

    Raises:
        ValueError: it names none.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not isinstance(names[0], str):
        raise ValueError(f"architectures must name the model's class, such as ['LlamaForCausalLM'], got {names!r}")
    return names[0]


def check_ways(ways: int, *, heads: int, kv_heads: int, mlp: int) -> None:
    """Every device gets whole query heads, at least one KV head of which it holds a copy, and an equal part of the mlp.

    Raises:
        ValueError: `ways` cannot do that; the message lists the numbers that can.
    """
    works = [n for n in range(1, heads + 1) if not heads % n and not mlp % n and (not kv_heads % n or not n % kv_heads)]
    if ways not in works:
        raise ValueError(
            f"tensor_parallel_size {ways} does not divide this model ({heads} heads, {kv_heads} KV heads, "
            f"intermediate_size {mlp}); these do: {', '.join(map(str, works))}"
        )


# Which layers have a sliding window, by architecture


def _no_windows(config: Fields, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _all_windowed(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Mistral: every layer, unless `layer_types` says which."""
    window = _window(config)
    return _by_layer_types(config, layers, window) if config.get("layer_types") else (window,) * layers


def _upper_windowed(config: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen: none unless `use_sliding_window`; then what `layer_types` says, or layers from `max_window_layers` on."""
    if not _flag(config, "use_sliding_window"):
        return (None,) * layers
    window = _window(config)
    if config.get("layer_types"):
        return _by_layer_types(config, layers, window)
    full = min(_size(config, "max_window_layers", 28, least=0), layers)
    return (None,) * full + (window,) * (layers - full)


def _window(config: Fields) -> int | None:
    return None if config.get("sliding_window") is None else _size(config, "sliding_window")


def _by_layer_types(config: Fields, layers: int, window: int | None) -> tuple[int | None, ...]:
    types = config["layer_types"]
    kinds = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list | tuple) or len(types) != layers or any(t not in kinds for t in types):
        raise ValueError(f"layer_types must name one of {', '.join(kinds)} for each of {layers} layers, got {types!r}")
    return tuple(kinds[t] for t in types)


_WINDOWS: Mapping[str, Callable[[Fields, int], tuple[int | None, ...]]] = {
    "MistralForCausalLM": _all_windowed,
    "Qwen2ForCausalLM": _upper_windowed,
    "Qwen3ForCausalLM": _upper_windowed,
}
_HEAD_DIM = {"Qwen3ForCausalLM": 128}
"""Where a config may leave head_dim out and does not mean hidden_size / num_attention_heads."""


# Reading fields


def _refuse(config: Fields) -> None:
    """Fields that would change the answer."""
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', got {config['hidden_act']!r}: no other is supported")
    quantised = config.get("quantization_config")
    if quantised:
        method = cast(Fields, quantised).get("quant_method") if isinstance(quantised, Mapping) else None
        raise ValueError(
            f"quantization_config names {method or 'no quant_method'}: this kind of checkpoint is not served"
        )


def _size(config: Fields, name: str, default: int | None = None, *, least: int = 1) -> int:
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def _number(config: Fields, name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _flag(config: Fields, name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value
