"""Reads a GGUF file as if it were a Hugging Face checkpoint.

Tensor names become Hugging Face's, blocks become float32, and config.json is made up from the metadata. Files of
architecture llama store the rows of q and k in another order (pairs of rotary dimensions side by side); that is
undone here, so nobody else needs to know. Parsing is the gguf package's. Never imports jax.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf import GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Format
from gguf.constants import GGUFValueType as ValueType
from gguf.gguf_reader import ReaderField, ReaderTensor

from jaxserve.weights.checkpoint import LoadError
from jaxserve.weights.readers.blocks import dequantize

Metadata = Mapping[str, object]
Part = np.ndarray | memoryview

_PLAIN = {Format.F32: "float32", Format.F16: "float16", Format.BF16: "bfloat16"}
_BLOCKS = (
    *(Format.Q8_0, Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1),
    *(Format.Q2_K, Format.Q3_K, Format.Q4_K, Format.Q5_K, Format.Q6_K),
)

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint:
    """One GGUF file of architecture llama (Mistral's too), qwen2 or qwen3.

    `config["rope_scaling"]` may be {"rope_type": "factors", "factors": [H/2 divisors of the frequencies]}: that is how
    GGUF stores Llama 3's scaling.

    Raises:
        LoadError: not a GGUF file, cut off, one part of several, or of an architecture or format not served.
    """

    def __init__(self, file: Path) -> None:
        reader = _open(file)
        self._file = file
        self.metadata: Metadata = _Fields(reader)
        """Keys and values as in the file; a value is decoded when it is asked for."""
        tensors = {t.name: t for t in reader.tensors}
        factors = tensors.pop(_ROPE_FACTORS, None)
        self._tensors = {_hugging_face_name(name): t for name, t in tensors.items()}
        keys = _Keys(file, self.metadata)
        _check(file, keys, self._tensors)
        self._row_groups = _permuted(keys)
        self.config: Mapping[str, object] = _config(keys, self._tensors, factors)
        self.generation_config: Mapping[str, object] = _generation_config(self.metadata)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return _shape(self._tensors[name])

    def dtype(self, name: str) -> str:
        fmt = self._tensors[name].tensor_type
        return _PLAIN.get(fmt, fmt.name)

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        rows = tensor.data.view(np.ndarray)
        projection = name.split(".")[-2] if "." in name else ""
        if projection in self._row_groups:
            rows = rows[_hugging_face_order(len(rows), self._row_groups[projection])]
        if tensor.tensor_type is Format.BF16:
            return rows.view(ml_dtypes.bfloat16)
        return rows if tensor.tensor_type in _PLAIN else dequantize(rows, tensor.tensor_type)

    def where(self, name: str) -> str:
        return str(self._file)


def read_metadata(file: Path) -> Metadata:
    """The keys and values of a GGUF file, of any architecture.

    Raises:
        LoadError: not a GGUF file, or cut off.
    """
    return _Fields(_open(file))


class _Reader(GGUFReader):
    """The package's reader made quick and careful.

    It builds several arrays per element of an array: 2 s for the vocabulary and merges of a small model, 0.05 s here.
    And it reports a cut-off file as a failed reshape.
    """

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, Sequence[Part], list[int], list[ValueType]]:
        if raw_type != ValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, count = ValueType(self._get(orig_offs, np.uint32)[0]), int(self._get(orig_offs + 4, np.uint64)[0])
        at = orig_offs + 12
        if item is ValueType.STRING:
            strings, end = self._strings(at, count)
            return end - orig_offs, strings, list(range(count)), [ValueType.ARRAY, item]
        if item in self.gguf_scalar_to_np:
            numbers = self._get(at, self.gguf_scalar_to_np[item], count)
            return 12 + numbers.nbytes, [numbers], [0], [ValueType.ARRAY, item]
        return super()._get_field_parts(orig_offs, raw_type)

    def _strings(self, at: int, count: int) -> tuple[list[Part], int]:
        """The bytes of `count` strings that begin at byte `at`, and where they end."""
        data, length = memoryview(self.data), struct.Struct("<Q").unpack_from
        strings: list[Part] = []
        for _ in range(count):
            end = at + 8 + length(data, at)[0]
            strings.append(data[at + 8 : end])
            at = end
        return strings, at

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        for field in fields:
            name, dims, raw_format, offset = (field.parts[i] for i in (1, 3, 4, 5))
            block, size = GGML_QUANT_SIZES[Format(raw_format[0])]
            end = start_offs + int(offset[0]) + math.prod(dims.tolist()) // block * size
            if end > len(self.data):
                text = bytes(name).decode(errors="replace")
                raise ValueError(f"cut off: tensor {text} ends at byte {end}, the file at {len(self.data)}")
        super()._build_tensors(start_offs, fields)


class _Fields(Mapping[str, object]):
    """A file's metadata, decoded at each look-up."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> object:
        return self._fields[key].contents()

    def __contains__(self, key: object) -> bool:
        return key in self._fields

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)


@dataclass(frozen=True)
class _Keys:
    """Typed look-ups in the metadata; `{arch}` in a key stands for the architecture."""

    file: Path
    metadata: Metadata

    @property
    def arch(self) -> str:
        return str(self.metadata.get("general.architecture"))

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise LoadError(f"{self.file}: metadata {key.format(arch=self.arch)} must be an integer, not {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoadError(f"{self.file}: metadata {key.format(arch=self.arch)} must be a number, not {value!r}")
        return float(value)

    def has(self, key: str) -> bool:
        return key.format(arch=self.arch) in self.metadata

    def _get(self, key: str, default: float | None) -> object:
        key = key.format(arch=self.arch)
        value = self.metadata.get(key, default)
        if value is None:
            raise LoadError(f"{self.file}: metadata lacks {key}")
        return value


def _open(file: Path) -> _Reader:
    try:
        reader = _Reader(file)
    except FileNotFoundError:
        raise LoadError(f"{file} does not exist") from None
    except (ValueError, IndexError, KeyError, OverflowError, OSError, struct.error) as e:
        raise LoadError(f"{file} is not a readable GGUF file ({e}); download it again") from None
    if reader.byte_order == "S":
        raise LoadError(f"{file} is a big-endian GGUF file; convert it with gguf-convert-endian")
    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise LoadError(f"{file} is one of {parts.contents()} parts; merge them with llama-gguf-split --merge first")
    return reader


def _check(file: Path, keys: _Keys, tensors: Mapping[str, ReaderTensor]) -> None:
    if keys.arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise LoadError(f"{file}: architecture {keys.arch!r} is not served from GGUF files; served: {known}")
    if keys.integer("{arch}.expert_count", 0):
        raise LoadError(f"{file}: mixtures of experts are not served from GGUF files")
    for name, tensor in tensors.items():
        if tensor.tensor_type not in (*_PLAIN, *_BLOCKS):
            served = ", ".join(f.name for f in (*_PLAIN, *_BLOCKS))
            fmt = tensor.tensor_type.name
            raise LoadError(f"{file}: tensor {name} has format {fmt}, which is not served; served: {served}")
    if "model.embed_tokens.weight" not in tensors:
        raise LoadError(f"{file}: no tensor token_embd.weight; a vocabulary-only file holds no model")


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name of a tensor; a name that is not known stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _INNER:
        return f"model.layers.{layer[1]}.{_INNER[layer[2]]}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if stem in _OUTER else name


def _permuted(keys: _Keys) -> dict[str, int]:
    """Projections whose rows the file holds in another order, and their number of heads."""
    if keys.arch != "llama":
        return {}
    heads = keys.integer("{arch}.attention.head_count")
    return {"q_proj": heads, "k_proj": keys.integer("{arch}.attention.head_count_kv", heads)}


def _hugging_face_order(rows: int, heads: int) -> np.ndarray:
    """i64[rows]: for each row in Hugging Face's order its row in a file of architecture llama."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))


def _config(keys: _Keys, tensors: Mapping[str, ReaderTensor], factors: ReaderTensor | None) -> dict[str, object]:
    heads = keys.integer("{arch}.attention.head_count")
    hidden = keys.integer("{arch}.embedding_length")
    head_dim = keys.integer("{arch}.attention.key_length", hidden // heads)
    window = keys.integer("{arch}.attention.sliding_window", 0)
    name = "MistralForCausalLM" if keys.arch == "llama" and window else _ARCHITECTURES[keys.arch]
    config: dict[str, object] = {
        "architectures": [name],
        "model_type": "mistral" if name.startswith("Mistral") else keys.arch,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.integer("{arch}.feed_forward_length"),
        "num_hidden_layers": keys.integer("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": _shape(tensors["model.embed_tokens.weight"])[0],
        "max_position_embeddings": keys.integer("{arch}.context_length"),
        "rms_norm_eps": keys.number("{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("{arch}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(keys, factors),
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in tensors,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "sliding_window": window or None,
        "bos_token_id": keys.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys.metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": _dtype(tensors),
    }
    rotated = keys.integer("{arch}.rope.dimension_count", head_dim)
    return config if rotated == head_dim else {**config, "partial_rotary_factor": rotated / head_dim}


def _dtype(tensors: Mapping[str, ReaderTensor]) -> str:
    """bfloat16 for a file of blocks; else that of most matrices."""
    formats = Counter(t.tensor_type for t in tensors.values() if len(t.shape) > 1)
    if any(fmt in _BLOCKS for fmt in formats):
        return "bfloat16"
    return _PLAIN[formats.most_common(1)[0][0]]


def _rope_scaling(keys: _Keys, factors: ReaderTensor | None) -> dict[str, object] | None:
    if factors is not None:
        return {"rope_type": "factors", "factors": factors.data.view(np.ndarray).tolist()}
    kind = keys.metadata.get(f"{keys.arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise LoadError(f"{keys.file}: rope scaling {kind!r} is not served from GGUF files; served: linear, yarn")
    scaling: dict[str, object] = {"rope_type": kind, "factor": keys.number("{arch}.rope.scaling.factor")}
    if keys.has("{arch}.rope.scaling.original_context_length"):
        length = keys.integer("{arch}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = length
    for name in ("beta_fast", "beta_slow") if kind == "yarn" else ():
        if keys.has(f"{{arch}}.rope.scaling.yarn_{name}"):
            scaling[name] = keys.number(f"{{arch}}.rope.scaling.yarn_{name}")
    return scaling


def _generation_config(metadata: Metadata) -> dict[str, object]:
    """The sampling the file recommends, and every token that ends an answer."""
    renamed = {
        "general.sampling.temp": "temperature",
        "general.sampling.top_k": "top_k",
        "general.sampling.top_p": "top_p",
        "general.sampling.min_p": "min_p",
        "general.sampling.penalty_repeat": "repetition_penalty",
        "tokenizer.ggml.bos_token_id": "bos_token_id",
    }
    config = {new: metadata[key] for key, new in renamed.items() if key in metadata}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    known = list(dict.fromkeys(e for e in ends if e is not None))
    return {**config, "eos_token_id": known} if known else config
