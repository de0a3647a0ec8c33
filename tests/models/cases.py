"""Tiny random checkpoints and what transformers answered for them; `record_reference.py` made both.

    for case in CASES:
        for recorded in case.recorded(): ...  # ids, prompt_len, logits

The directories are complete checkpoints: config.json and model.safetensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Recorded:
    """One sequence. The first `prompt_len` ids came in one call, each later one alone, from the cache."""

    ids: np.ndarray
    """i32[L]"""
    prompt_len: int
    logits: np.ndarray
    """f32[L, V], after every token."""


@dataclass(frozen=True)
class Case:
    name: str

    @property
    def directory(self) -> Path:
        return DATA / self.name

    @property
    def logits_file(self) -> Path:
        return self.directory / "logits.npz"

    def recorded(self) -> list[Recorded]:
        with np.load(self.logits_file) as data:
            count = len(data.files) // 3
            return [Recorded(data[f"ids_{i}"], int(data[f"prompt_len_{i}"]), data[f"logits_{i}"]) for i in range(count)]


CASES = tuple(Case(path.parent.name) for path in sorted(DATA.glob("*/config.json")))
"""bias, dynamic, linear, llama2, llama3, mistral, qwen2, qwen2_window, qwen3, qwen3_alternating, yarn."""
ROPES = DATA / "ropes.json"
"""A list of {"config", "head_dim", "inv_freq", "scale"}: frequencies for many spellings of the rope fields."""
