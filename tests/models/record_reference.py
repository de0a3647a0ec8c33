"""Makes tests/models/data: tiny random checkpoints, and logits of transformers for them. Run by hand, from the root:

    python -m tests.models.record_reference

in any environment with torch and transformers (recorded with torch 2.13 and transformers 5.24). Weights and token ids
come from fixed seeds. The tests read the recorded files only and need neither.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from tests.models.cases import DATA, ROPES

LENGTHS = (6, 40)
SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "torch_dtype": "float32",
}
GROUPED = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA = {**GROUPED, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
MISTRAL = {**GROUPED, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1e4}
QWEN2 = {**GROUPED, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6}
QWEN3 = {**QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16, "attention_bias": False}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WINDOW = {"sliding_window": 8, "use_sliding_window": True}
ALTERNATING = ["full_attention", "sliding_attention"] * 2


@dataclass(frozen=True)
class Recipe:
    """A checkpoint, and the sequences to record: (length, how many of these are the prompt)."""

    config: dict
    sequences: tuple[tuple[int, int], ...] = field(default=tuple((n, n) for n in LENGTHS))


RECIPES = {
    "llama2": Recipe(
        {**LLAMA, "num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    ),
    "llama3": Recipe({**LLAMA, "num_key_value_heads": 1, "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE}),
    "linear": Recipe({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.5}}),
    "dynamic": Recipe(
        {
            **LLAMA,
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        sequences=((6, 6), (40, 40), (40, 10), (40, 24)),
    ),
    "yarn": Recipe({**LLAMA, "rope_theta": 1e4, "rope_scaling": YARN_ROPE}),
    "bias": Recipe({**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": Recipe({**MISTRAL, "num_hidden_layers": 3, "sliding_window": 8}),
    "qwen2": Recipe({**QWEN2, "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 8}),
    "qwen2_window": Recipe({**QWEN2, **WINDOW, "num_hidden_layers": 4, "max_window_layers": 3}),
    "qwen3": Recipe({**QWEN3, "tie_word_embeddings": True}),
    "qwen3_alternating": Recipe(
        {**QWEN3, **WINDOW, "num_hidden_layers": 4, "layer_types": ALTERNATING, "attention_bias": True, "head_dim": 12}
    ),
}
ROPE_FIELDS = [
    {"rope_theta": 1e6},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 2e4}},
    {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}},
    {"rope_theta": 3e4, "rope_scaling": {"rope_type": "dynamic", "factor": 3.0}},
    {"rope_parameters": {**LLAMA3_ROPE, "factor": 32.0, "original_max_position_embeddings": 512}},
    {"rope_parameters": {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}},
    {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 1.3}},
    {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "attention_factor": 1.5, "beta_fast": 8, "beta_slow": 2}},
    {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "original_max_position_embeddings": 512, "truncate": False}},
    {"rope_theta": 1e4, "original_max_position_embeddings": 256, "rope_scaling": YARN_ROPE},
    {"rope_theta": 1e4, "rope_scaling": {**YARN_ROPE, "factor": None}},
]


def main() -> None:
    shutil.rmtree(DATA, ignore_errors=True)
    for number, (name, recipe) in enumerate(RECIPES.items()):
        record(name, recipe, seed=number)
    record_ropes()


def record(name: str, recipe: Recipe, seed: int) -> None:
    directory = DATA / name
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(recipe.config, indent=1) + "\n")
    torch.manual_seed(seed)
    save_weights(empty_model(name), directory / "model.safetensors")
    arrays: dict[str, np.ndarray] = {}
    draw = np.random.default_rng(seed)
    for i, (length, prompt) in enumerate(recipe.sequences):
        ids = draw.integers(0, recipe.config["vocab_size"], length)
        # A model of its own for every sequence: dynamic rope remembers the longest one it has seen.
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        arrays[f"ids_{i}"] = ids.astype(np.int32)
        arrays[f"prompt_len_{i}"] = np.int32(prompt)
        arrays[f"logits_{i}"] = answer(model.eval(), torch.tensor(ids)[None], prompt)
    np.savez_compressed(directory / "logits.npz", **arrays)


def empty_model(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(DATA / name))


@torch.no_grad()
def save_weights(model: PreTrainedModel, path) -> None:
    """Random weights large enough for attention to be sharp, gains around 1, biases that matter."""
    for parameter_name, value in model.named_parameters():
        scale = 0.3 if value.ndim > 1 else 0.2
        value.normal_(0.0, scale)
        if "norm" in parameter_name:
            value.add_(1.0)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight")
    save_file({k: v.contiguous() for k, v in weights.items()}, path, metadata={"format": "pt"})


@torch.no_grad()
def answer(model: PreTrainedModel, ids: torch.Tensor, prompt: int) -> np.ndarray:
    cache = DynamicCache(config=model.config)
    parts = [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]
    parts = [part for part in parts if part.shape[1]]
    logits = [model(part, cache=cache, use_cache=True).logits for part in parts]
    return torch.cat(logits, dim=1)[0].float().numpy()


def record_ropes() -> None:
    found = []
    for fields in ROPE_FIELDS:
        config = {**LLAMA, "head_dim": 64, "max_position_embeddings": 2048, **fields}
        directory = DATA / "rope"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(config))
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        rope = model.model.rotary_emb
        shutil.rmtree(directory)
        # Shortest decimals of the float32 numbers.
        inv_freq = [float(str(x)) for x in rope.inv_freq.numpy()]
        found.append({"config": config, "head_dim": 64, "inv_freq": inv_freq, "scale": float(rope.attention_scaling)})
    ROPES.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
