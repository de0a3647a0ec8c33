"""What `--deterministic` costs: output tokens a second with it and without, in turns, on the same prompts.

python benchmarks/deterministic.py [--dtype float32] [--concurrency 1 8 32] [--repeat 3]
"""

from __future__ import annotations

import argparse
import statistics
import time

from jaxserve import LLM, SamplingParams

TOKENS = 48


def speed(llm: LLM, concurrency: int) -> float:
    """Output tokens a second of `concurrency` greedy answers to prompts of 32 tokens."""
    prompts = [[100 + i] * 32 for i in range(concurrency)]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return concurrency * TOKENS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    plain = LLM(dtype=args.dtype, max_model_len=1024)
    exact = LLM(dtype=args.dtype, max_model_len=1024, deterministic=True)
    print(f"{args.dtype}: output tokens/s, medians of {args.repeat} in turns")
    print("concurrent   default   deterministic   ratio")
    for n in args.concurrency:
        pairs = [(speed(plain, n), speed(exact, n)) for _ in range(args.repeat)]
        a, b = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{n:10d} {a:9.1f} {b:15.1f} {b / a:7.2f}")


if __name__ == "__main__":
    main()
