"""Measures how much the engine answers when all requests are there at once, without a server.

Sampling is greedy, answers are as long as the data set says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import jaxserve
from jaxserve import RequestOutput, SamplingParams
from server import flags
from server.bench import datasets, options
from server.bench.answers import Sample
from server.bench.command import BenchError
from server.bench.offline import engine, read_words


def add_flags(parser: argparse.ArgumentParser) -> None:
    datasets.add_flags(parser)
    group = parser.add_argument_group("results")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write the numbers into a file")


def run(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    own, others, rest = read_words(parser, words)
    try:
        dataset = datasets.read_flags(own)
    except ValueError as error:
        parser.error(str(error))
    config = flags.read_engine_flags(others, rest)
    with engine(config) as llm:
        try:
            samples = dataset.draw(llm.tokenizer)
            outputs, seconds = measure(llm, samples, quiet=own.disable_tqdm)
        except ValueError as error:
            raise BenchError(str(error)) from None
    found = record(outputs, seconds)
    print(
        f"Throughput: {found['requests_per_second']:.2f} requests/s, {found['tokens_per_second']:.2f} total tokens/s, "
        f"{found['output_tokens_per_second']:.2f} output tokens/s\n"
        f"Total num prompt tokens:  {found['total_prompt_tokens']:.0f}\n"
        f"Total num output tokens:  {found['total_output_tokens']:.0f}"
    )
    if own.output_json is not None:
        options.write_json(own.output_json, found)
    return 0


def measure(llm: jaxserve.LLM, samples: Sequence[Sample], *, quiet: bool) -> tuple[list[RequestOutput], float]:
    """All answers, and the seconds that they took together."""
    params = [SamplingParams(temperature=0, max_tokens=s.output_tokens, ignore_eos=True) for s in samples]
    begin = time.perf_counter()
    outputs = llm.generate([sample.prompt for sample in samples], params, use_tqdm=not quiet)
    return outputs, time.perf_counter() - begin


def record(outputs: Sequence[RequestOutput], seconds: float) -> dict[str, float]:
    """The numbers, under vLLM's names and some more."""
    prompts = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(outputs),
        "total_num_tokens": prompts + made,
        "total_prompt_tokens": prompts,
        "total_output_tokens": made,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": (prompts + made) / seconds,
        "output_tokens_per_second": made / seconds,
    }
