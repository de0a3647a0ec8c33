"""What is measured: workloads by name, precision and settings, and how fast nothing could be faster."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.peers.driver import Request
from benchmarks.peers.models import Sizes

WORKLOAD = Path(__file__).parents[1] / "data" / "workload.json"
SPECIAL = 17
"""Tokens below it are SmolLM2's special ones."""
VOCAB = 49_152
SEQUENCES = 64
"""That may be computed together, in every engine."""
LENGTH = 1536
"""Of the longest sequence, in tokens; no request of the workload needs more."""
BYTES = {"bf16": 2, "f32": 4, "int8": 1}
"""Of a weight."""


@dataclass(frozen=True)
class Case:
    name: str
    kind: Literal["offline", "start", "http"]
    workload: str
    told: str
    """What it is, for the table."""
    precision: str = "bf16"
    caching: bool = True
    concurrency: int = 0
    """Of the HTTP load."""
    floor: Literal["arithmetic", "bandwidth"] | None = None
    usual: bool = True
    """Measured unless other cases are named."""


CASES = (
    Case("mixed64", "offline", "mixed64", "64 requests of all lengths, bf16", floor="arithmetic"),
    Case("single", "offline", "single", "one request, bf16", floor="bandwidth"),
    Case("shared32", "offline", "shared32", "32 requests with one long beginning, bf16, prefix cache on"),
    Case("shared32-off", "offline", "shared32", "the same with the prefix cache off", caching=False),
    Case("single-f32", "offline", "single", "one request, f32", precision="f32", floor="bandwidth"),
    Case("mixed64-f32", "offline", "mixed64", "64 requests, f32", precision="f32", floor="arithmetic", usual=False),
    Case("single-int8", "offline", "single", "one request, int8 weights", precision="int8", floor="bandwidth"),
    Case("mixed64-int8", "offline", "mixed64", "64 requests, int8", precision="int8", floor="arithmetic", usual=False),
    Case("http48-c8", "http", "http48", "48 requests over HTTP, 8 at a time, bf16", concurrency=8),
    Case("http48-c16", "http", "http48", "48 requests over HTTP, 16 at a time, bf16", concurrency=16),
    Case("start", "start", "single", "from a new process to its first token, bf16"),
)


@dataclass(frozen=True)
class Speeds:
    """What the machine can do: see `probe`."""

    bandwidth: float
    """Bytes a second."""
    products: Mapping[str, float]
    """Operations a second, by precision."""


def read_workload(name: str, path: Path = WORKLOAD) -> list[Request]:
    """All requests of a workload."""
    return [(one["prompt_ids"], one["max_tokens"]) for one in json.loads(path.read_text())[name]]


def shifted(requests: Sequence[Request], turn: int) -> list[Request]:
    """Other tokens for each turn, so that none is found in a prefix cache; what was alike within a turn stays alike."""
    span = VOCAB - SPECIAL
    return [([(t - SPECIAL + 101 * turn) % span + SPECIAL for t in prompt], count) for prompt, count in requests]


def cut(requests: Sequence[Request], most: int, tokens: int) -> list[Request]:
    """The first few, with short answers."""
    return [(prompt, min(count, tokens)) for prompt, count in requests[:most]]


def floor_rate(case: Case, requests: Sequence[Request], sizes: Sizes, speeds: Speeds) -> float | None:
    """Output tokens a second that no engine can beat on these requests; None where the case has no such floor.

    Arithmetic: every token is multiplied with the body once, every sampled one with the head; attention is left out.
    Bandwidth: every sampled token reads all weights and the KV before it, as one sequence alone does.
    """
    answered = sum(count for _, count in requests)
    if case.floor == "arithmetic":
        entered = sum(len(prompt) for prompt, _ in requests)
        operations = 2 * sizes.body * (entered + answered) + 2 * sizes.head * answered
        return answered * speeds.products[case.precision] / operations
    if case.floor == "bandwidth":
        context = sum(count * (len(prompt) + count / 2) for prompt, count in requests) / answered
        kv = sizes.kv * (4 if case.precision == "f32" else 2)
        return speeds.bandwidth / ((sizes.body + sizes.head) * BYTES[case.precision] + kv * context)
    return None
