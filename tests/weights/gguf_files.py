"""Small GGUF files for tests, written by the gguf package."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quants

HIDDEN, MLP, HEADS, KV_HEADS, LAYERS, VOCAB = 64, 96, 4, 2, 2, 40
HEAD_DIM = HIDDEN // HEADS

SHAPES = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (MLP, HIDDEN),
    "mlp.up_proj.weight": (MLP, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, MLP),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
BIASES = {f"self_attn.{p}_proj.bias": (SHAPES[f"self_attn.{p}_proj.weight"][0],) for p in "qkv"}
STORED = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def tensors(*, biases: bool = False, qk_norms: bool = False, head: bool = False) -> dict[str, np.ndarray]:
    """Random float32 tensors of a model, by Hugging Face's names."""
    rng = np.random.default_rng(0)
    norms = {f"self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"} if qk_norms else {}
    inner = {**SHAPES, **(BIASES if biases else {}), **norms}
    shapes = {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in inner.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(
    file: Path,
    arch: str,
    weights: dict[str, np.ndarray],
    *,
    fmt: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, int | float | str | list] | None = None,
    extra: dict[str, tuple[np.ndarray, GGMLQuantizationType | None]] | None = None,
) -> Path:
    """A file of `weights`, matrices in format `fmt`, with q and k stored as architecture `arch` does.

    `extra` tensors are written as they are.
    """
    writer = GGUFWriter(file, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](key, value)
    for name, (array, raw) in (extra or {}).items():
        writer.add_tensor(name, array, raw_dtype=raw)
    for name, array in weights.items():
        stored = pairwise(array, name) if arch == "llama" else array
        if array.ndim > 1 and fmt is not GGMLQuantizationType.F32:
            writer.add_tensor(_stored_name(name), quants.quantize(stored, fmt), raw_dtype=fmt)
        else:
            writer.add_tensor(_stored_name(name), stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def pairwise(array: np.ndarray, name: str) -> np.ndarray:
    """Rows of q and k as files of architecture llama hold them: dimension i next to i + H/2 of the same head."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return array
    rest = array.shape[1:]
    heads = HEADS if ".q_proj." in name else KV_HEADS
    halves = array.reshape(heads, 2, HEAD_DIM // 2, *rest)
    return np.ascontiguousarray(np.moveaxis(halves, 1, 2).reshape(array.shape))


def _stored_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not name.startswith("model.layers."):
        return outer.get(name, name.replace("lm_head", "output"))
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{STORED[stem]}.{kind}"
