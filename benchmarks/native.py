"""The native CPU kernels beside plain XLA: what a decode step takes, at several numbers of sequences.

    python benchmarks/native.py

Two engines of the same model take turns in one process, so that a busy machine slows both. A step's time is what a
longer answer takes more, divided by the tokens; CPU time is of all threads.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from statistics import median

from jaxserve import LLM, SamplingParams
from jaxserve.prompts import TokensPrompt

STEPS = 32
VOCABULARY = (1000, 40_000)
PROMPTS = (50, 800)


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(llm: LLM, prompts: list[TokensPrompt], tokens: int) -> tuple[float, float]:
    """Wall and CPU seconds of answers of this many tokens."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    began, used = time.perf_counter(), cpu_seconds()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began, cpu_seconds() - used


def step(llm: LLM, prompts: list[TokensPrompt]) -> tuple[float, float]:
    """Wall and CPU seconds of one decode step; the prompts are in the prefix cache."""
    short, long = timed(llm, prompts, 1), timed(llm, prompts, 1 + STEPS)
    return (long[0] - short[0]) / STEPS, (long[1] - short[1]) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", default=None)
    args = parser.parse_args()
    options = {"dtype": args.dtype, "quantization": args.quantization, "num_pages": 4097}
    engines = {name: LLM(cpu_kernels=name, **options) for name in ("native", "xla")}
    draw = random.Random(0)
    print("| sequences | native, ms (CPU ms) | XLA, ms (CPU ms) | XLA / native | by CPU |")
    print("| --- | --- | --- | --- | --- |")
    for count in args.sequences:
        prompts: list[TokensPrompt] = [
            {"prompt_token_ids": [draw.randrange(*VOCABULARY) for _ in range(draw.randrange(*PROMPTS))]}
            for _ in range(count)
        ]
        for llm in engines.values():
            timed(llm, prompts, 2)
        rounds = [{name: step(llm, prompts) for name, llm in engines.items()} for _ in range(args.rounds)]
        wall, cpu = ({name: median(one[name][i] for one in rounds) for name in engines} for i in (0, 1))
        cells = [f"{1e3 * wall[name]:.0f} ({1e3 * cpu[name]:.0f})" for name in engines]
        ratios = [f"{some['xla'] / some['native']:.1f}" for some in (wall, cpu)]
        print(f"| {' | '.join([str(count), *cells, *ratios])} |", flush=True)


if __name__ == "__main__":
    main()
