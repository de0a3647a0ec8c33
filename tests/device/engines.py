"""Engines over the tiny recorded checkpoints, through the real launcher."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from jaxserve.config import EngineConfig
from jaxserve.launch import Launched, launch
from jaxserve.types import Request, RequestOutput, SamplingParams
from tests.models.cases import DATA, Case

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "num_pages": 40, "max_logprobs": 4}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxserve-tiny-")


def with_tokenizer(case: Case, vocab: int = 128) -> Path:
    """The checkpoint beside a tokenizer whose token i is the word 't{i}'."""
    place = Path(_directory().name) / case.name
    if not place.exists():
        place.mkdir()
        for file in ("config.json", "model.safetensors"):
            (place / file).symlink_to(case.directory / file)
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(vocab)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return place


def start(name: str, **options: object) -> Launched:
    directory = with_tokenizer(Case(name))
    return launch(EngineConfig(model=str(directory), dtype="float32", **{**SMALL, **options}))  # type: ignore[arg-type]


def run(launched: Launched, requests: Sequence[Request]) -> dict[str, RequestOutput]:
    """All requests at once, to their ends."""
    engine, done = launched.engine, {}
    for request in requests:
        engine.check(request)
        engine.add(request)
    while engine.busy:
        for new in engine.step():
            done[new.request_id] = done[new.request_id].joined(new) if new.request_id in done else new
    return done


def request(name: str, prompt: Sequence[int], **params: object) -> Request:
    settings = {"temperature": 0, "ignore_eos": True, "max_tokens": 12, **params}
    return Request(name, tuple(prompt), SamplingParams(**settings))  # type: ignore[arg-type]


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.{o.index}": o.token_ids for name, out in sorted(outputs.items()) for o in out.outputs}


__all__ = ["DATA", "request", "run", "start", "tokens", "with_tokenizer"]
