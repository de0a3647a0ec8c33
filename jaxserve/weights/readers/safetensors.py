"""Reads a directory in Hugging Face's layout: config.json and one or many .safetensors files.

The files are mapped into memory, so reading costs nothing until the bytes are used. Everything a header claims is
checked against the file before a tensor is handed out. Knows no model; never imports jax.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxserve.weights.checkpoint import LoadError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100 * 1024 * 1024

_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    """Of the first byte, counted from the start of the file."""


class SafetensorsCheckpoint:
    """A directory with config.json and safetensors files.

    `model.safetensors.index.json` decides which file holds a tensor; without it every .safetensors file is read, and
    no tensor may be in two of them.

    Raises:
        LoadError: a file is missing, cut off or malformed.
    """

    def __init__(self, directory: Path) -> None:
        self.config: Mapping[str, object] = read_json(directory / "config.json")
        generation = directory / "generation_config.json"
        self.generation_config: Mapping[str, object] = read_json(generation) if generation.exists() else {}
        self._tensors = _indexed(directory) if (directory / INDEX).exists() else _unindexed(directory)
        files = {t.file for t in self._tensors.values()}
        self._bytes = {file: np.memmap(file, np.uint8, "r") for file in files}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype.name

    def read(self, name: str) -> np.ndarray:
        t = self._tensors[name]
        size = prod(t.shape) * t.dtype.itemsize
        return self._bytes[t.file][t.begin : t.begin + size].view(np.ndarray).view(t.dtype).reshape(t.shape)

    def where(self, name: str) -> str:
        return str(self._tensors[name].file)


def read_json(file: Path) -> dict[str, object]:
    """The object in a JSON file.

    Raises:
        LoadError: missing, unreadable, or not an object.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{file} does not exist; a model directory needs it") from None
    except (OSError, ValueError) as e:
        raise LoadError(f"{file} is not readable JSON: {e}") from None
    if not isinstance(data, dict):
        raise LoadError(f"{file} must hold a JSON object, not {type(data).__name__}")
    return data


def _indexed(directory: Path) -> dict[str, _Tensor]:
    index = read_json(directory / INDEX).get("weight_map")
    if not isinstance(index, dict):
        raise LoadError(f"{directory / INDEX} has no weight_map")
    headers: dict[str, dict[str, _Tensor]] = {}
    for shard in sorted(set(index.values())):
        file = directory / shard
        if not file.exists():
            raise LoadError(f"{file} is missing; {INDEX} names it, download it again")
        headers[shard] = _header(file)
    for name, shard in index.items():
        if name not in headers[shard]:
            raise LoadError(f"{directory / shard} lacks tensor {name}, which {INDEX} says it holds")
    return {name: headers[shard][name] for name, shard in index.items()}


def _unindexed(directory: Path) -> dict[str, _Tensor]:
    files = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith(("consolidated", "adapter")))
    if not files:
        raise LoadError(
            f"{directory} holds no .safetensors file; other formats must be converted first, "
            "and a GGUF file is served by giving its own path"
        )
    found: dict[str, _Tensor] = {}
    for file in files:
        for name, tensor in _header(file).items():
            if name in found:
                raise LoadError(f"tensor {name} is in both {found[name].file} and {file}, and there is no {INDEX}")
            found[name] = tensor
    return found


def _header(file: Path) -> dict[str, _Tensor]:
    """What a file says it holds, checked against its size."""
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
            raise LoadError(f"{file} is cut off or not a safetensors file: its header would take {length} bytes")
        raw = f.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {name: _tensor(file, name, entry, 8 + length, size) for name, entry in header.items()}
    except LoadError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise LoadError(f"{file} has a malformed header: {e!r}") from None


def _tensor(file: Path, name: str, entry: dict, start: int, size: int) -> _Tensor:
    dtype, shape = _DTYPES.get(entry["dtype"]), tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype is None:
        raise LoadError(f"{file}: tensor {name} has dtype {entry['dtype']}; known: {', '.join(_DTYPES)}")
    if any(not isinstance(n, int) or n < 0 for n in (*shape, begin, end)):
        raise LoadError(f"{file}: tensor {name} has an impossible shape or offset")
    if prod(shape) * dtype.itemsize != end - begin:
        raise LoadError(f"{file}: tensor {name} of shape {shape} cannot take {end - begin} bytes")
    if start + end > size:
        raise LoadError(f"{file} is cut off: tensor {name} ends at byte {start + end}, the file at {size}")
    return _Tensor(file, dtype, shape, start + begin)
