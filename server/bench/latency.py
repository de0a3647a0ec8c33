"""Measures how long one batch of equal requests takes from beginning to end, without a server.

Prompts are random token ids, new ones each time, so that no prefix is cached.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import jaxserve
from jaxserve import SamplingParams
from server import flags
from server.bench import options
from server.bench.command import BenchError
from server.bench.offline import engine, read_words
from server.bench.summary import percentile

PERCENTILES = (10, 25, 50, 75, 90, 99)
TEXT = "the quick brown fox jumps over the lazy dog and runs home through a dark green forest in the rain"


@dataclass(frozen=True, slots=True)
class Batch:
    input_len: int
    output_len: int
    size: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    numbers = {
        "--input-len": (32, "tokens of a prompt"),
        "--output-len": (128, "tokens of an answer"),
        "--batch-size": (8, "requests at once"),
        "--num-iters": (30, "batches that are measured"),
    }
    for name, (default, told) in numbers.items():
        group.add_argument(
            name, type=options.positive, default=default, metavar="N", help=f"{told} (default: {default})"
        )
    group.add_argument(
        "--num-iters-warmup", type=options.count, default=10, metavar="N", help="batches before them (default: 10)"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers into a file")


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    own, others, rest = read_words(parser, words)
    config = flags.read_engine_flags(others, rest)
    batch = Batch(own.input_len, own.output_len, own.batch_size)
    with engine(config) as llm:
        try:
            measured = measure(llm, batch, own.num_iters_warmup, own.num_iters, quiet=own.disable_tqdm)
        except ValueError as error:
            raise BenchError(str(error)) from None
    found = sorted(measured)
    shares = {p: percentile(found, p) for p in PERCENTILES}
    print(f"Avg latency: {statistics.fmean(found)} seconds")
    for p, value in shares.items():
        print(f"{p}% percentile latency: {value} seconds")
    if own.output_json is not None:
        record = {
            "avg_latency": statistics.fmean(found),
            "latencies": measured,
            "percentiles": {str(p): value for p, value in shares.items()},
        }
        options.write_json(own.output_json, record)
    return 0


def measure(llm: jaxserve.LLM, batch: Batch, warmups: int, times: int, *, quiet: bool) -> list[float]:
    """Seconds of each of `times` batches."""
    rng = random.Random(0)
    known = sorted(set(llm.tokenizer.encode(TEXT, False)))
    params = SamplingParams(temperature=1.0, top_p=1.0, ignore_eos=True, max_tokens=batch.output_len)
    found: list[float] = []
    for _ in tqdm(range(warmups + times), desc="batches", disable=True if quiet else None):
        prompts = [rng.choices(known, k=batch.input_len) for _ in range(batch.size)]
        begin = time.perf_counter()
        llm.generate(list(prompts), params, use_tqdm=False)
        found.append(time.perf_counter() - begin)
    return found[warmups:]
