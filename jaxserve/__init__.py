"""jaxserve: serves open language models on NVIDIA GPUs and CPUs, with JAX.

Public names: LLM, SamplingParams, BeamSearchParams, StructuredOutputsParams, Engine, AsyncEngine, EngineConfig,
Forecast. They are imported when they are first used, so that `import jaxserve` starts no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.types import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from jaxserve.async_engine import AsyncEngine
    from jaxserve.engine import Engine
    from jaxserve.forecast import Forecast
    from jaxserve.launching import Launched, launch
    from jaxserve.llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "Forecast",
    "Launched",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ServerConfig",
    "StructuredOutputsParams",
    "launch",
]

_LAZY = {
    "LLM": "jaxserve.llm",
    "AsyncEngine": "jaxserve.async_engine",
    "Engine": "jaxserve.engine",
    "Forecast": "jaxserve.forecast",
    "Launched": "jaxserve.launching",
    "launch": "jaxserve.launching",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
