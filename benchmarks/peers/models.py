"""The demo model in the format of every engine, made from the one GGUF file that jaxserve ships with, and kept.

All formats of a precision hold the same numbers: the file's weights dequantised, then rounded to bfloat16 (or not, or
quantised again to eight bits in the engine's own way).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import demo
from jaxserve.weights.source import open_checkpoint

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
_FILE_TYPES = {
    gguf.GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    gguf.GGMLQuantizationType.F32: gguf.LlamaFileType.ALL_F32,
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of weights: what a token is multiplied with, and what each sampled token is besides."""

    body: int
    head: int
    kv: int
    """Numbers of KV for each token of context."""


@dataclass(frozen=True)
class Models:
    """All formats, each made when it is first asked for."""

    directory: Path

    def sizes(self) -> Sizes:
        checkpoint = open_checkpoint(demo.find())
        config = checkpoint.config
        counts = {name: int(np.prod(checkpoint.shape(name))) for name in checkpoint.names()}
        head = counts["model.embed_tokens.weight"]
        kv = (
            2 * _whole(config, "num_hidden_layers") * _whole(config, "num_key_value_heads") * _whole(config, "head_dim")
        )
        return Sizes(body=sum(counts.values()) - head, head=head, kv=kv)

    def hugging_face(self, dtype: str) -> Path:
        """A directory with safetensors and a tokenizer. `dtype`: bfloat16 or float32."""
        return self._made(f"hugging-face-{dtype}", lambda directory: _write_hugging_face(directory, dtype))

    def gguf(self, kind: str) -> Path:
        """A file. `kind`: BF16, F32 or Q8_0."""
        return self._made(f"smollm2-{kind}.gguf", lambda file: _write_gguf(file, gguf.GGMLQuantizationType[kind]))

    def openvino(self, weights: str, python: Path) -> Path:
        """A directory that OpenVINO reads. `weights`: bf16, f32 or int8. `python` has optimum-intel installed."""
        source = self.hugging_face("float32" if weights == "f32" else "bfloat16")
        return self._made(f"openvino-{weights}", lambda directory: _export_openvino(source, directory, weights, python))

    def _made(self, name: str, write: Callable[[Path], None]) -> Path:
        """Renamed to its name when it is whole."""
        path = self.directory / name
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            half = path.with_name(f"half-{name}")
            shutil.rmtree(half, ignore_errors=True)
            write(half)
            half.rename(path)
        return path


def _write_hugging_face(directory: Path, dtype: str) -> None:
    directory.mkdir()
    checkpoint = open_checkpoint(demo.find())
    tensors = {name: np.ascontiguousarray(checkpoint.read(name).astype(DTYPES[dtype])) for name in checkpoint.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**checkpoint.config, "dtype": dtype}))
    (directory / "tokenizer.json").write_text(Tokenizer.load(demo.find()).definition())
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))


def _write_gguf(file: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Norms stay float32, as llama.cpp wants them."""
    reader = gguf.GGUFReader(demo.find())
    writer = gguf.GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stored = kind if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        if stored == gguf.GGMLQuantizationType.Q8_0:
            numbers = numbers.astype(ml_dtypes.bfloat16).astype(np.float32)
        writer.add_tensor(tensor.name, gguf.quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _export_openvino(source: Path, directory: Path, weights: str, python: Path) -> None:
    formats = {"bf16": "fp16", "f32": "fp32", "int8": "int8"}
    subprocess.run(
        [
            *(python.with_name("optimum-cli"), "export", "openvino", "--model", source),
            *("--task", "text-generation-with-past", "--weight-format", formats[weights], directory),
        ],
        check=True,
    )


def _whole(config: Mapping[str, object], name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value
