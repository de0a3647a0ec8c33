"""The models whose programs are compiled for an H200. A new family joins by one line in `FAMILIES`."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.chips import chips
from jaxserve.config import EngineConfig
from jaxserve.device import programs, topology
from jaxserve.device.audit import Expected
from jaxserve.device.executables import Program
from jaxserve.device.programs import Buckets, Shapes
from jaxserve.launching import size
from jaxserve.models.known import CONFIGS
from jaxserve.weights.readers.description import Description

FAMILIES: dict[str, tuple[str, int]] = {
    "llama-3.1-8b": ("meta-llama/Llama-3.1-8B-Instruct", 1),
    "qwen2.5-7b": ("Qwen/Qwen2.5-7B-Instruct", 1),
    "llama-3.1-70b": ("meta-llama/Llama-3.1-70B-Instruct", 4),
}
"""By a short name: whose config, and how many GPUs share it."""
TOKENS = (1, 16, 256, 2048)
ROWS = (1, 16, 256)
NAMES = (
    *(f"forward {tokens}" for tokens in TOKENS),
    *(f"sample {rows}{full}" for rows in ROWS for full in ("", " full")),
)
"""Of the programs of a family."""
PAGES = 1024
"""The size of the pool changes nothing but itself."""


def shapes(family: str) -> tuple[Shapes, dict[str, object]]:
    """The engine's own shapes, and XLA's options for its programs."""
    model, ways = FAMILIES[family]
    config = EngineConfig(
        model=model,
        tensor_parallel_size=ways,
        max_model_len=8192,
        token_buckets=TOKENS,
        max_num_seqs=ROWS[-1],
        num_pages=PAGES,
    )
    sized = size(config, Description(CONFIGS[model], model), topology.mesh(chips()["h200"], ways), None)
    return replace(sized.shapes, buckets=Buckets(TOKENS, ROWS)), sized.options


def all_programs(family: str) -> dict[str, tuple[Program, Expected, dict[str, object]]]:
    """By family and name, each with what is expected of it."""
    s, options = shapes(family)
    layers = int(CONFIGS[FAMILIES[family][0]]["num_hidden_layers"])  # type: ignore[call-overload]
    forwards = {t: (programs.forward(s, t), Expected.of_forward(s, t, layers)) for t in TOKENS}
    samples = {
        (r, full): (programs.sample(s, r, full=full), Expected.of_sample(s, r, full=full))
        for r in ROWS
        for full in (False, True)
    }
    return {f"{family}: {p.name}": (p, e, options) for p, e in (*forwards.values(), *samples.values())}
