"""What a model's name means, and which reader opens it.

A name is a local directory, a .gguf file, the demo model or a Hugging Face id, tried in that order. Importing this
costs nothing; readers and the hub are imported when a model needs them.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

from jaxserve.config import DEMO_MODEL
from jaxserve.weights import demo
from jaxserve.weights.checkpoint import Checkpoint, LoadError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(model: str, revision: str | None = None) -> Path:
    """The directory or GGUF file of a model; downloads it if it has to.

    Raises:
        ValueError: there is no such model, or it cannot be had; says what to do.
    """
    found = _local(model)
    if found is not None:
        return found
    hub = importlib.import_module("jaxserve.weights.hub")
    return hub.download(model, revision, hub.MODEL)


def resolve_tokenizer(name: str, revision: str | None = None) -> Path:
    """As `resolve`, without the weights: what `Tokenizer.load` takes."""
    found = _local(name)
    if found is not None:
        return found
    hub = importlib.import_module("jaxserve.weights.hub")
    return hub.download(name, revision, hub.TOKENIZER)


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in a directory or GGUF file.

    Raises:
        LoadError: it is missing, damaged, or of a kind that is not served.
    """
    if path.is_file():
        return importlib.import_module("jaxserve.weights.readers.gguf").GgufCheckpoint(path)
    if not path.is_dir():
        raise LoadError(f"{path} does not exist")
    return importlib.import_module("jaxserve.weights.readers.safetensors").SafetensorsCheckpoint(path)


def open_description(path: Path) -> Checkpoint:
    """What a directory's config.json says, as a checkpoint without tensors.

    Raises:
        LoadError: there is none.
    """
    return importlib.import_module("jaxserve.weights.readers.description").Description.of_directory(path)


def generation_config(directory: str) -> dict[str, object]:
    """What the generation_config.json of a directory says.

    Raises:
        LoadError: there is none, or it is not readable.
    """
    readers = importlib.import_module("jaxserve.weights.readers.safetensors")
    return readers.read_json(Path(directory).expanduser() / "generation_config.json")


def _local(name: str) -> Path | None:
    """What the name means on this machine; None if it is a Hugging Face id."""
    path = Path(name).expanduser()
    if path.is_file() and path.suffix != ".gguf":
        raise ValueError(f"model {path}: give the directory that holds config.json, or a .gguf file")
    if name and path.exists():
        return path
    if name == DEMO_MODEL:
        return demo.find()
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(name):
        raise ValueError(f"model {name!r}: no such file or directory")
    return None
