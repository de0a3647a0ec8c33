"""Which file serves which architecture. Nothing is imported until it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from jaxserve.layers.stack import Decoder
from jaxserve.models.config import CacheGroup, DecoderConfig
from jaxserve.weights.leaf import Source

_FILES = {
    "LlamaForCausalLM": ("llama", "Llama"),
    "MistralForCausalLM": ("mistral", "Mistral"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3"),
}


@dataclass(frozen=True)
class Family:
    """What a model file offers."""

    model: Callable[..., Decoder]
    """Called as model(config, rngs=, dtype=)."""
    tensors: Callable[[DecoderConfig], list[Source]]
    cache_groups: Callable[[DecoderConfig], list[CacheGroup]]


def architectures() -> tuple[str, ...]:
    """Those that can be served, by the names in a config.json."""
    return tuple(sorted(_FILES))


def family(architecture: str) -> Family:
    """The model file of an architecture.

    Raises:
        ValueError: it is not known; the message lists those that are.
    """
    if architecture not in _FILES:
        raise ValueError(f"architecture {architecture!r} is not supported; supported: {', '.join(architectures())}")
    file, name = _FILES[architecture]
    module = importlib.import_module(f"jaxserve.models.{file}")
    return Family(getattr(module, name), module.tensors, module.cache_groups)
