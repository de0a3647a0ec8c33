"""What structured outputs cost: decode steps of rows with and without a constraint, in turns, on the demo model.

python benchmarks/structured.py [--rows 16] [--repeat 5]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import jaxserve.engine as stepping
from jaxserve import LLM, SamplingParams, StructuredOutputsParams
from jaxserve.grammar.constraint import Constraint, TokenMasks

TOKENS = 64
SHAPES = {
    "regex": StructuredOutputsParams(regex="[A-Za-z ,.]{400}"),
    "schema": StructuredOutputsParams(
        json={
            "type": "array",
            "minItems": 20,
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
                "required": ["name", "age"],
                "additionalProperties": False,
            },
        }
    ),
}


class Watch:
    """Counts the seconds spent in filling masks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._fill = stepping.fill

    def __call__(self, constraints: Sequence[tuple[int, Constraint]], masks: TokenMasks) -> None:
        began = time.perf_counter()
        self._fill(constraints, masks)
        self.seconds += time.perf_counter() - began


def seconds(llm: LLM, rows: int, shape: StructuredOutputsParams | None) -> float:
    """For `TOKENS` tokens of each row. Log probabilities are asked for, so that no token is taken in unsampled."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, logprobs=0, structured_outputs=shape)
    began = time.perf_counter()
    llm.generate([[100 + i] * 16 for i in range(rows)], params, use_tqdm=False)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(max_model_len=1024)
    stepping.fill = watch = Watch()
    print(f"{args.rows} rows, {TOKENS} tokens each; medians of {args.repeat} in turns")
    print("shape     s without   s with   ratio   of that filling masks")
    for name, shape in SHAPES.items():
        seconds(llm, args.rows, shape)
        rounds: list[tuple[float, float, float]] = []
        for _ in range(args.repeat):
            free = seconds(llm, args.rows, None)
            watch.seconds = 0.0
            rounds.append((free, seconds(llm, args.rows, shape), watch.seconds))
        a, b, c = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:8s} {a:10.2f} {b:8.2f} {b / a:7.2f} {c / b:16.2%}")


if __name__ == "__main__":
    main()
