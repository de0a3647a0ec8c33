"""What every checkpoint format offers the loader, and how it fails.

Tensor names, shapes and layouts are Hugging Face's whatever the format: a linear layer is [out, in]. Knows no model,
no device; never imports jax.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np


class LoadError(ValueError):
    """A checkpoint cannot be loaded; the message names the file, the tensor, and what to do."""


class Checkpoint(Protocol):
    """Named tensors and the configuration that came with them. Reading is thread-safe."""

    @property
    def config(self) -> Mapping[str, object]:
        """As in Hugging Face's config.json."""
        ...

    @property
    def generation_config(self) -> Mapping[str, object]:
        """As in Hugging Face's generation_config.json; empty if there is none."""
        ...

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> str:
        """numpy's or ml_dtypes' name, or the name of the quantised format ("Q4_1")."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor, mapped from the file where its bytes allow it; quantised ones come as float32."""
        ...

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages."""
        ...
