"""The real engine on the model of a `Size`: started from a directory that holds no weights, and driven step by step."""

from __future__ import annotations

import itertools
import json
import random
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.gpu.sizes import Model
from jaxserve import EngineConfig, SamplingParams
from jaxserve.launching import Launched, launch
from jaxserve.types import Request


def model_directory(folder: Path, model: Model) -> Path:
    """config.json and a tokenizer whose token i is the word "t{i}"; made once."""
    place = folder / "model"
    if not (place / "config.json").exists():
        place.mkdir(exist_ok=True)
        words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(model.vocab)}, unk_token="t0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(place / "tokenizer.json"))
        (place / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (place / "config.json").write_text(json.dumps(model.config()))
    return place


def start(folder: Path, model: Model, options: Mapping[str, object]) -> Launched:
    """An engine with random weights in bfloat16 that compiles into and from the folder's cache."""
    fixed = {"load_format": "dummy", "dtype": "bfloat16", "compilation_cache_dir": str(folder / "cache")}
    return launch(EngineConfig(model=str(model_directory(folder, model)), **fixed, **options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Decoding:
    """Steps in which every sequence got one token."""

    step: float
    """Seconds, mean."""
    median: float
    host: float
    """Seconds of processor time a step, of the thread that plans, launches and reads."""


class Driver:
    """Feeds an engine with random prompts, so that no page is found in the prefix cache, and waits for its tokens."""

    def __init__(self, launched: Launched, vocab: int) -> None:
        self.engine = launched.engine
        self._step_tokens = launched.config.max_num_batched_tokens or 1
        self._vocab = vocab
        self._random = random.Random(0)
        self._count = 0

    def add(self, prompt: int, answer: int) -> None:
        """A request of `prompt` tokens that ends after `answer` tokens, greedy."""
        ids = tuple(self._random.randrange(self._vocab) for _ in range(prompt))
        params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
        self._count += 1
        request = Request(str(self._count), ids, params, None, 0, arrival=time.monotonic())
        self.engine.check(request)
        self.engine.add(request)

    def step(self) -> int:
        """One call of the engine; how many tokens came."""
        return sum(len(choice.token_ids) for output in self.engine.step() for choice in output.outputs)

    def finish(self) -> int:
        """Until nothing runs; how many tokens came."""
        tokens = 0
        while self.engine.busy:
            tokens += self.step()
        return tokens

    def seconds(self, requests: int, prompt: int, answer: int) -> float:
        """From asking to the last token."""
        begin = time.perf_counter()
        for _ in range(requests):
            self.add(prompt, answer)
        tokens = self.finish()
        found = time.perf_counter() - begin
        if tokens != requests * answer:
            raise RuntimeError(f"{requests} requests of {answer} tokens gave {tokens}")
        return found

    def settle(self, batch: int, context: int, steps: int) -> None:
        """Gets `batch` sequences of `context` tokens to where each step gives all of them a token, `steps` times."""
        entering = -(-batch * context // max(1, self._step_tokens - batch))
        for _ in range(batch):
            self.add(context, steps + entering + 8)
        tokens = 0
        while tokens < 2 * batch or self.step() != batch:
            tokens += self.step()
            if not self.engine.busy:
                raise RuntimeError(f"{batch} sequences were never all at work: is there room for so many?")

    def decode(self, batch: int, context: int, steps: int) -> Decoding:
        """Times `steps` decode steps of `batch` sequences with `context` tokens and a few more, then ends them."""
        self.settle(batch, context, steps)
        times, host = [time.perf_counter()], time.thread_time()
        while len(times) <= steps and self.engine.busy:
            if self.step() == batch:
                times.append(time.perf_counter())
        host = time.thread_time() - host
        self.finish()
        if len(times) <= steps:
            raise RuntimeError(f"only {len(times) - 1} of {steps} steps gave all {batch} sequences a token")
        taken = [new - old for old, new in itertools.pairwise(times)]
        return Decoding(statistics.fmean(taken), statistics.median(taken), host / len(taken))
