"""What a config.json says of a model, without its weights: for one that is only measured, or planned for.

Never imports jax.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np

from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.safetensors import read_json


@dataclass(frozen=True)
class Description:
    """A `Checkpoint` without tensors."""

    config: Mapping[str, object]
    origin: str
    """Where that stands, for messages."""
    generation_config: Mapping[str, object] = field(default_factory=dict)

    @staticmethod
    def of_directory(directory: Path) -> Description:
        """
        Raises:
            LoadError: config.json is missing or malformed.
        """
        file, generation = directory / "config.json", directory / "generation_config.json"
        return Description(read_json(file), str(file), read_json(generation) if generation.exists() else {})

    def names(self) -> Collection[str]:
        """Only what the config itself tells: whether there is a head beside the embedding."""
        return () if self.config.get("tie_word_embeddings") else ("lm_head.weight",)

    def shape(self, name: str) -> tuple[int, ...]:
        self._refuse(name)

    def dtype(self, name: str) -> str:
        self._refuse(name)

    def read(self, name: str) -> np.ndarray:
        self._refuse(name)

    def where(self, name: str) -> str:
        return self.origin

    def _refuse(self, name: str) -> NoReturn:
        raise LoadError(f"{self.origin} describes a model and holds no tensor {name}")
