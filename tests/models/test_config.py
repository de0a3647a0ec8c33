"""config.json to DecoderConfig: sizes, windows, tensor-parallel ways, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.models.config import CacheGroup, DecoderConfig, architecture_of, cache_groups

FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Mistral", "Qwen2", "Qwen3"))


def read(ways: int = 1, **changes) -> DecoderConfig:
    return DecoderConfig.from_hf({**FIELDS, **changes}, ways=ways, tied=False)


def test_sizes():
    c = read()
    assert (c.embed, c.heads, c.kv_heads, c.head_dim, c.mlp, c.layers) == (48, 12, 2, 4, 96, 4)
    assert (c.vocab, c.padded_vocab, c.eps, c.max_position) == (101, 128, 1e-5, 64)
    assert c.windows == (None,) * 4
    assert (c.attention_bias, c.mlp_bias, c.tie) == (False, False, False)


def test_what_a_config_may_leave_out():
    fields = {k: v for k, v in FIELDS.items() if k not in ("num_key_value_heads", "rms_norm_eps")}
    c = DecoderConfig.from_hf(fields, tied=True)
    assert (c.kv_heads, c.eps, c.tie) == (12, 1e-6, True)
    assert read(head_dim=None).head_dim == 4
    assert read(head_dim=6).head_dim == 6
    assert read(architectures=[QWEN3]).head_dim == 128


@pytest.mark.parametrize(
    ("ways", "kv_heads", "padded"), [(1, 2, 128), (2, 2, 128), (4, 4, 128), (6, 6, 384), (12, 12, 384)]
)
def test_ways(ways: int, kv_heads: int, padded: int):
    c = read(ways)
    assert (c.kv_heads, c.checkpoint_kv_heads, c.padded_vocab) == (kv_heads, 2, padded)
    assert c.heads % c.kv_heads == 0


@pytest.mark.parametrize("ways", [0, 3, 5, 8, 24])
def test_impossible_ways_name_those_that_work(ways: int):
    with pytest.raises(ValueError, match=r"tensor_parallel_size \d+ .* these do: 1, 2, 4, 6, 12"):
        read(ways)


LATER = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
TYPES = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, (None,) * 4),
        (MISTRAL, {"sliding_window": 8}, (8,) * 4),
        (MISTRAL, {"sliding_window": None}, (None,) * 4),
        (MISTRAL, {}, (None,) * 4),
        (MISTRAL, {"sliding_window": 8, "layer_types": TYPES}, (None, 8, None, 8)),
        (QWEN2, LATER, (None, None, None, 8)),
        (QWEN2, {**LATER, "use_sliding_window": False}, (None,) * 4),
        (QWEN2, {**LATER, "max_window_layers": 0}, (8,) * 4),
        (QWEN2, {"use_sliding_window": True, "sliding_window": 8}, (None,) * 4),
        (QWEN3, {**LATER, "layer_types": TYPES}, (None, 8, None, 8)),
        (QWEN3, {**LATER, "use_sliding_window": False, "layer_types": TYPES}, (None,) * 4),
    ],
)
def test_windows(architecture: str, fields: dict, windows: tuple[int | None, ...]):
    assert read(architectures=[architecture], **fields).windows == windows


def test_cache_groups_part_layers_by_window():
    c = replace(read(), windows=(8, None, 8, 8))
    assert cache_groups(c) == [CacheGroup(3, 2, 4, 8), CacheGroup(1, 2, 4, None)]
    assert cache_groups(replace(c, windows=(None,) * 4)) == [CacheGroup(4, 2, 4, None)]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("quantization_config", {"quant_method": "awq"}),
        ("rope_scaling", {"type": "longrope", "factor": 2.0}),
        ("vocab_size", None),
        ("hidden_size", "48"),
        ("num_hidden_layers", 0),
        ("num_attention_heads", True),
        ("num_key_value_heads", 5),
        ("max_position_embeddings", None),
        ("rms_norm_eps", "small"),
        ("attention_bias", "yes"),
        ("architectures", None),
        ("architectures", []),
    ],
)
def test_refusals_name_the_field(field: str, value: object):
    with pytest.raises(ValueError, match=field):
        read(**{field: value})


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", None])
def test_quantised_checkpoints_are_refused_by_their_method(method: str | None):
    """Before any of their numbers is taken for something else."""
    with pytest.raises(ValueError, match=f"quantization_config .*{method or 'no quant_method'}"):
        read(quantization_config={"bits": 4, "version": "gemm"} | ({"quant_method": method} if method else {}))


@pytest.mark.parametrize("types", [["full_attention"] * 3, ["full_attention"] * 3 + ["chunked_attention"], "full"])
def test_layer_types_must_fit(types: object):
    with pytest.raises(ValueError, match="layer_types"):
        read(architectures=[QWEN2], **LATER, layer_types=types)


def test_architecture_is_the_first_one_named():
    assert architecture_of({"architectures": ["A", "B"]}) == "A"
