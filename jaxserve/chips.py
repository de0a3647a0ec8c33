"""The GPUs that programs can be compiled for on a machine that has none: their figures, and what this process needs.

The figures are data, in chips.yaml. Must never import jax: `prepare` has to run before that.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import yaml

CPU = "cpu"
WHEELS = Path(sys.prefix) / "gpu-compile"
"""Where `make gpu-compile` puts CUDA's compiler, apart from the packages that Python sees by itself: jax would look for
a GPU."""
_PLUGIN = "jax_cuda13_plugin"
_INSTALL = "run `make gpu-compile`, or install the extra: pip install 'jaxserve[cuda]' (Linux only)"


@dataclass(frozen=True)
class Chip:
    """A GPU. Bytes, bytes per second and operations per second."""

    name: str
    compute_capability: list[int]
    accelerated: bool
    """It has instructions that its successors lack (sm_90a)."""
    cores: int
    fpus_per_core: int
    clock_ghz: float
    shared_memory_per_core: int
    shared_memory_per_block: int
    l2: int
    memory: int
    bandwidth: float
    peak: float
    """Of dense products of 16-bit floats."""
    estimated: bool
    """Nobody has compiled the gate's models for it."""


@cache
def chips() -> dict[str, Chip]:
    """Every chip by its short name."""
    data = cast(dict[str, dict[str, object]], yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()))
    return {key: Chip(**fields) for key, fields in data.items()}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Device:
    """Chips of one kind: what `--device` names."""

    key: str
    count: int | None
    """None: as many as tensor_parallel_size says."""

    @staticmethod
    def named(text: str) -> Device:
        """From `h200`, `h200x4` or `cpu`.

        Raises:
            ValueError: there is no such chip; the message lists those that are.
        """
        match = re.fullmatch(r"(.+?)(?:x(\d+))?", text.lower())
        if match is None or match[1] not in (*chips(), CPU) or match[2] == "0":
            known = ", ".join((*chips(), CPU))
            raise ValueError(f"device must be one of {known}, with x and a number for several (h200x4), got {text!r}")
        return Device(match[1], int(match[2]) if match[2] else None)

    @property
    def chip(self) -> Chip | None:
        """None for a CPU."""
        return chips().get(self.key)


def can_compile() -> bool:
    """The wheels are here that compile for a GPU."""
    return WHEELS.is_dir() or importlib.util.find_spec(_PLUGIN) is not None


def prepare(device: Device, ways: int) -> None:
    """Has jax, when it is imported after this, start on the CPU only, and find CUDA's compiler for a GPU.

    Raises:
        ValueError: the wheels for it are not installed; the message says how they are.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what is compiled here runs nowhere
    if device.chip is None:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={ways}".strip()
        return
    if not can_compile():
        raise ValueError(f"compiling for {device.chip.name} needs CUDA's compiler as Linux wheels: {_INSTALL}")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # it would ask a driver that need not be there
    if WHEELS.is_dir() and str(WHEELS) not in sys.path:
        sys.path.append(str(WHEELS))
