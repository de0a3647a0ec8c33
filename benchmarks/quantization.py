"""What `--quantization` costs in accuracy and gains in speed, beside the same model without it, in one run.

    python benchmarks/quantization.py [--quantization int8] [--model smollm2-135m-instruct] [--texts FILE ...]

Accuracy: every token of the texts is scored after those before it: perplexity, how often both engines find the same
token most likely, how far the logprob of the token that stands there moves. Speed: decode is one request after another,
64 tokens each; prefill one prompt of 512 tokens. The engines take turns; the best round of each counts, and the median
of the ratios is told too.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve import LLM, SamplingParams

DOCS = Path(__file__).parent.parent / "docs" / "design"
PIECE, PROMPT, ANSWER = 512, 512, 64
"""Tokens of a scored piece of text, of a prompt that is timed, of an answer that is timed."""


@dataclass(frozen=True)
class Scored:
    """A token of a text."""

    logprob: float
    likeliest: int


def pieces(llm: LLM, texts: Sequence[Path], most: int) -> list[list[int]]:
    """The texts in pieces of `PIECE` tokens, at most `most` tokens in all."""
    ids = [token for text in texts for token in llm.tokenizer.encode(text.read_text())][:most]
    return [ids[at : at + PIECE] for at in range(0, len(ids) - 1, PIECE)]


def score(llm: LLM, prompts: Sequence[list[int]]) -> list[Scored]:
    """Every token of the pieces but their first ones."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found: list[Scored] = []
    for prompt, output in zip(prompts, llm.generate(list(prompts), params, use_tqdm=False), strict=True):
        assert output.prompt_logprobs is not None
        for token, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True):
            assert entries is not None
            likeliest = next(token for token, entry in entries.items() if entry.rank == 1)
            found.append(Scored(entries[token].logprob, likeliest))
    return found


def perplexity(scored: Sequence[Scored]) -> float:
    return math.exp(-statistics.fmean(one.logprob for one in scored))


def decode(llm: LLM) -> float:
    """Seconds a token of one request, its prompt not counted."""
    return (_timed(llm, 16, ANSWER + 1) - _timed(llm, 16, 1)) / ANSWER


def prefill(llm: LLM) -> float:
    """Seconds a token of one prompt."""
    return _timed(llm, PROMPT, 1) / PROMPT


def _timed(llm: LLM, prompt: int, answer: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True)
    began = time.perf_counter()
    llm.generate([[100 + i % 1000 for i in range(prompt)]], params, use_tqdm=False)
    return time.perf_counter() - began


def show_accuracy(plain: Sequence[Scored], other: Sequence[Scored], name: str) -> None:
    before, after = perplexity(plain), perplexity(other)
    same = statistics.fmean(a.likeliest == b.likeliest for a, b in zip(plain, other, strict=True))
    moved = statistics.fmean(abs(a.logprob - b.logprob) for a, b in zip(plain, other, strict=True))
    print(f"{len(plain)} tokens: perplexity {before:.3f} plain, {after:.3f} {name} ({after / before - 1:+.2%})")
    print(f"same most likely token: {same:.1%}; logprob of the token that stands there moves by {moved:.3f} on average")


def show_speed(what: str, measure: Callable[[LLM], float], plain: LLM, other: LLM, repeat: int, name: str) -> None:
    pairs = [(measure(plain), measure(other)) for _ in range(repeat)]
    a, b = (min(column) * 1e3 for column in zip(*pairs, strict=True))
    middle = statistics.median(x / y for x, y in pairs)
    print(
        f"{what}: {a:.3f} ms a token plain, {b:.3f} {name}: {a / b:.2f} times as fast (median of rounds {middle:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=Path, nargs="+", default=sorted(DOCS.glob("*.md")), help="default: docs/design")
    parser.add_argument("--tokens", type=int, default=4096, help="of the texts, at most")
    parser.add_argument("--repeat", type=int, default=5, help="rounds of each speed")
    given = parser.parse_args()
    common = {
        "dtype": given.dtype,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "token_buckets": (8, PROMPT),
        "num_pages": 8 * 1024 // 16 + 1,
        "enable_prefix_caching": False,
    }
    with LLM(given.model, **common) as plain, LLM(given.model, quantization=given.quantization, **common) as other:
        name = given.quantization
        weights = [sum(array.nbytes for array in llm.params) / 2**20 for llm in (plain, other)]
        print(f"{given.model}, {given.dtype}: weights {weights[0]:.0f} MiB plain, {weights[1]:.0f} MiB {name}")
        prompts = pieces(plain, given.texts, given.tokens)
        show_accuracy(score(plain, prompts), score(other, prompts), name)
        show_speed("decode", decode, plain, other, given.repeat, name)
        show_speed("prefill", prefill, plain, other, given.repeat, name)


if __name__ == "__main__":
    main()
