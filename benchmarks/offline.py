"""Output tokens a second of `LLM` on recorded workloads, beside a plain transformers loop on the same weights.

    python benchmarks/offline.py --reference-python OTHER_VENV/bin/python --reference-requests 4

Greedy, every answer as long as the workload says. Each run has an engine of its own, so that no prefix is cached
before it begins; starting and the first request are not counted. `benchmarks/data/workload.json` holds token ids of
SmolLM2: `single` is one request, `mixed64` prompts and answers of all lengths, `shared32` one long prompt with 32 ends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve import LLM, SamplingParams
from jaxserve.types import RequestStats, StepStats
from jaxserve.weights.source import open_checkpoint, resolve

HERE = Path(__file__).parent
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@dataclass(frozen=True)
class Work:
    """A request of the workload."""

    prompt: list[int]
    count: int
    """Tokens to answer."""


@dataclass
class Watch:
    """An `Observer` that adds up while it is `on`."""

    on: bool = False
    steps: int = 0
    computed: int = 0
    """Prompt tokens."""
    hits: int = 0
    preemptions: int = 0
    unused: list[float] = field(default_factory=list)
    """Share of the allocated KV slots, a step."""

    def on_step(self, step: StepStats) -> None:
        if not self.on:
            return
        self.steps += 1
        self.computed += step.prompt_tokens
        self.hits += step.prefix_hits
        self.preemptions += step.preemptions
        if step.pages_used:
            self.unused.append(step.slots_unused)

    def on_finish(self, request: RequestStats) -> None:
        pass

    def on_recompile(self, seconds: float) -> None:
        raise RuntimeError(f"XLA compiled for {seconds:.1f} s during a measurement")


@dataclass(frozen=True)
class Timed:
    """Answers, and what they took."""

    answers: list[list[int]]
    seconds: float
    cpu: float
    """Seconds of all threads together: still comparable where other programs share the machine."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers))

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / self.seconds

    def times_as_fast(self, other: Timed) -> str:
        by_cpu = self.tokens / self.cpu * other.cpu / other.tokens
        return f"{self.rate / other.rate:.1f} times as fast, by CPU time {by_cpu:.1f} times"


@dataclass(frozen=True)
class Run(Timed):
    """Of the engine."""

    watch: Watch


@dataclass(frozen=True)
class Reference(Timed):
    """Of the transformers loop, for the first requests of a workload."""

    threads: int
    dtype: str


def run(model: str, dtype: str, works: Sequence[Work]) -> Run:
    """All requests at once, by an engine that has answered nothing but one short request."""
    watch = Watch()
    with LLM(model, dtype=dtype, observers=[watch]) as llm:
        llm.generate([0] * 32, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        watch.on = True
        params = [SamplingParams(temperature=0, max_tokens=work.count, ignore_eos=True) for work in works]
        begin, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate([work.prompt for work in works], params, use_tqdm=False)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Run([list(output.outputs[0].token_ids) for output in outputs], seconds, cpu, watch)


def write_checkpoint(model: str, dtype: str, directory: Path) -> None:
    """The model's weights and config as a directory that transformers opens, read by the engine's own reader."""
    checkpoint = open_checkpoint(resolve(model))
    tensors = {name: np.ascontiguousarray(checkpoint.read(name).astype(DTYPES[dtype])) for name in checkpoint.names()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**checkpoint.config, "dtype": dtype}))


def refer(python: str, directory: Path, works: Sequence[Work]) -> Reference:
    done = subprocess.run(
        [python, HERE / "reference.py", directory],
        input=json.dumps([(work.prompt, work.count) for work in works]),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return Reference(**json.loads(done.stdout))


def show_run(name: str, works: Sequence[Work], runs: Sequence[Run]) -> None:
    best = max(runs, key=lambda one: one.rate)
    watch = best.watch
    print(
        f"{name:10s} jaxserve      {len(works):4d} requests {best.tokens:6d} tokens "
        f"{best.seconds:8.2f} s {best.rate:8.1f} tokens/s  ({best.cpu:.1f} s of CPU)\n"
        f"{'':10s} prompt tokens {sum(len(work.prompt) for work in works)}: computed {watch.computed}, "
        f"prefix hits {watch.hits}; {watch.steps} steps, {watch.preemptions} preemptions; "
        f"unused share of allocated KV slots {mean(watch.unused or [0.0]):.2%}",
        flush=True,
    )
    if len(runs) > 1:
        print(f"{'':10s} all runs: {', '.join(f'{one.rate:.1f}' for one in runs)} tokens/s")


def show_reference(name: str, works: Sequence[Work], reference: Reference, ours: Run) -> None:
    count = len(reference.answers)
    same = [_agreeing(a, b) for a, b in zip(reference.answers, ours.answers, strict=False)]
    print(
        f"{name:10s} transformers  {count:4d} requests {reference.tokens:6d} tokens "
        f"{reference.seconds:8.2f} s {reference.rate:8.1f} tokens/s  ({reference.cpu:.1f} s of CPU; "
        f"the first {count} of {len(works)}, one at a time, {reference.dtype}, {reference.threads} threads)\n"
        f"{'':10s} jaxserve is {ours.times_as_fast(reference)}; answers agree for "
        f"{sum(same)} of {reference.tokens} tokens up to their first difference",
        flush=True,
    )


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="one with SmolLM2's vocabulary")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--workload", type=Path, default=HERE / "data" / "workload.json")
    parser.add_argument("--workloads", nargs="+", default=["single", "mixed64", "shared32"])
    parser.add_argument("--repeat", type=int, default=1, help="runs of each workload; the best one counts")
    parser.add_argument("--reference-python", help="a Python with torch and transformers; unset: no comparison")
    parser.add_argument("--reference-requests", type=int, default=4, help="how many of a workload it answers")
    given = parser.parse_args()
    recorded = json.loads(given.workload.read_text())
    with tempfile.TemporaryDirectory(prefix="jaxserve-reference-") as directory:
        if given.reference_python:
            write_checkpoint(given.model, given.dtype, Path(directory))
        for name in given.workloads:
            works = [Work(one["prompt_ids"], one["max_tokens"]) for one in recorded[name]]
            runs = [run(given.model, given.dtype, works) for _ in range(given.repeat)]
            show_run(name, works, runs)
            if given.reference_python:
                some = works[: given.reference_requests]
                reference = refer(given.reference_python, Path(directory), some)
                show_reference(name, works, reference, max(runs, key=lambda one: one.rate))


if __name__ == "__main__":
    main()
