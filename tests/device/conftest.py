"""A checkpoint for tensor parallel tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.models.cases import Case


@pytest.fixture(scope="session")
def eight_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that eight devices can share: 8 query heads, 2 KV heads (repeated), 101 tokens (padded)."""
    source, place = Case("llama3").directory, tmp_path_factory.mktemp("eight") / "eight_heads"
    place.mkdir()
    config = json.loads((source / "config.json").read_text())
    head = 8
    config |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": head}
    rng = np.random.default_rng(0)
    width = config["hidden_size"]
    sizes = {
        "q_proj": (8 * head, width),
        "k_proj": (2 * head, width),
        "v_proj": (2 * head, width),
        "o_proj": (width, 8 * head),
    }
    weights = load_file(source / "model.safetensors")
    for name in list(weights):
        for part, shape in sizes.items():
            if part in name:
                weights[name] = rng.normal(0, shape[1] ** -0.5, shape).astype(np.float32)
    (place / "config.json").write_text(json.dumps(config))
    save_file(weights, place / "model.safetensors")
    return place
