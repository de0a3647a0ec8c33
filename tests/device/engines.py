"""Engines over the tiny recorded checkpoints, through the real launcher.

Compiling is what costs, so a launched model is kept, and engines with other limits are put on its executor.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from jaxserve.config import EngineConfig
from jaxserve.deltas import Deltas
from jaxserve.engine import Engine
from jaxserve.grammar.compile import Compiler
from jaxserve.host.scheduler import Scheduler
from jaxserve.launching import Launched, launch
from jaxserve.types import Request, RequestOutput, SamplingParams
from tests.models.cases import Case


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxserve-tiny-")


def with_tokenizer(checkpoint: Path) -> Path:
    """The checkpoint beside a tokenizer whose token i is the word 't{i}'."""
    place = Path(_directory().name) / checkpoint.name
    if not place.exists():
        place.mkdir()
        for file in ("config.json", "model.safetensors"):
            (place / file).symlink_to(checkpoint / file)
        vocab = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return place


def start(checkpoint: Path | str, **options: object) -> Launched:
    """A case's name or a directory. One step size, so that few programs compile."""
    directory = Case(checkpoint).directory if isinstance(checkpoint, str) else checkpoint
    small = {"token_buckets": (64,), "max_num_seqs": 4, "block_size": 8, "num_pages": 60, "max_logprobs": 4}
    config = {"model": str(with_tokenizer(directory)), "dtype": "float32", **small, **options}
    return launch(EngineConfig(**config))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Tight:
    """What an engine may use of a launched one. None: what there is."""

    tokens: int | None = None
    pages: int | None = None
    depth: int = 2
    caching: bool = True
    rows: int | None = None


def engine(launched: Launched, tight: Tight | None = None) -> Engine:
    """A fresh engine on the same executor; the one before must have come to its end."""
    tight = tight or Tight()
    limits = launched.engine.scheduler.limits
    limits = replace(
        limits,
        tokens=tight.tokens or limits.tokens,
        rows=tight.rows or limits.rows,
        pages=limits.pages if tight.pages is None else (tight.pages,) * len(limits.pages),
        caching=tight.caching,
    )
    return Engine(Scheduler(limits), launched.executor, launched.tokenizer, launched.engine.bounds, depth=tight.depth)


def run(engine: Engine, requests: Sequence[Request], grammars: Compiler | None = None) -> dict[str, RequestOutput]:
    """All requests at once, to their ends; every row and page must come home. `grammars` compiles what they ask for."""
    done: dict[str, Deltas] = {}
    for request in requests:
        engine.check(request)
        shape = request.params.structured_outputs
        engine.add(request, (), None if grammars is None or shape is None else grammars.submit(shape).result())
    while engine.busy:
        for new in engine.step():
            done.setdefault(new.request_id, Deltas()).add(new)
    assert not engine.scheduler.running
    assert all(pool.free == pool.total for pool in engine.scheduler.pools)
    return {name: deltas.whole() for name, deltas in done.items()}


def request(name: str, prompt: Sequence[int], **params: object) -> Request:
    """Greedy, twelve tokens, unless told otherwise."""
    settings = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, **params}
    return Request(name, tuple(prompt), SamplingParams(**settings))  # type: ignore[arg-type]


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{o.index}": o.token_ids for name, out in sorted(outputs.items()) for o in out.outputs}
