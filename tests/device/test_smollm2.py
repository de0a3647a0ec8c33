"""The demo model in float32 against what transformers recorded of it: tokens, logprobs, and nothing that changes them.

Recorded by transformers and torch in float32 on the CPU, greedy, with `<|im_end|>` (2) as the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.launching import Launched, launch
from jaxserve.types import Request, RequestOutput, SamplingParams
from tests.device.engines import Tight, engine, run

DATA = Path(__file__).parent.parent / "data" / "smollm2_reference.json"
CLOSE = 2e-3
"""Where the two best logits are nearer than this, rounding decides and what follows is not compared."""
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Recorded:
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    gaps: tuple[float, ...]
    top: tuple[dict[int, float], ...]
    prompt_logprobs: tuple[float | None, ...]

    @property
    def certain(self) -> int:
        """Tokens up to the first close call."""
        return next((i for i, gap in enumerate(self.gaps) if gap < CLOSE), len(self.output))


def read() -> list[Recorded]:
    return [
        Recorded(
            tuple(case["prompt_ids"]),
            tuple(case["output_ids"]),
            tuple(case["top2_gap"]),
            tuple({int(token): value for token, value in step} for step in case["top5_logprobs"]),
            tuple(case["prompt_logprobs"]),
        )
        for case in json.loads(DATA.read_text())["cases"]
    ]


CASES = read()
LONGEST = max(len(c.prompt) + len(c.output) for c in CASES)


def start(deterministic: bool) -> Launched:
    config = EngineConfig(
        dtype="float32",
        max_model_len=LONGEST + 1,
        max_num_seqs=len(CASES),
        token_buckets=(64, 256) if deterministic else (16, 256),
        num_pages=256,
        max_logprobs=5,
        deterministic=deterministic,
    )
    return launch(config)


@pytest.fixture(scope="module")
def plain() -> Iterator[Launched]:
    launched = start(deterministic=False)
    yield launched
    launched.engine.close()


@pytest.fixture(scope="module")
def exact() -> Iterator[Launched]:
    launched = start(deterministic=True)
    yield launched
    launched.engine.close()


def asked(case: int, *, scored: bool = False) -> Request:
    c = CASES[case]
    params = SamplingParams(temperature=0, max_tokens=len(c.output), logprobs=5, prompt_logprobs=0 if scored else None)
    return Request(str(case), c.prompt, params)


def check(done: Mapping[str, RequestOutput]) -> None:
    """Every recorded token up to the first close call, with its logprob and those of the five most likely ones."""
    for name, out in done.items():
        c, got = CASES[int(name)], out.outputs[0]
        assert got.token_ids[: c.certain] == c.output[: c.certain], name
        assert got.logprobs is not None
        for at in range(c.certain):
            for token, value in c.top[at].items():
                assert abs(got.logprobs[at][token].logprob - value) < TOLERANCE, (name, at)
        if out.prompt_logprobs is not None:
            assert out.prompt_logprobs[0] is None
            for at in range(1, len(c.prompt)):
                entry, want = out.prompt_logprobs[at], c.prompt_logprobs[at]
                assert entry is not None and want is not None
                assert abs(entry[c.prompt[at]].logprob - want) < TOLERANCE, (name, at)


@pytest.mark.parametrize("case", range(len(CASES)))
def test_alone(plain: Launched, case: int) -> None:
    check(run(engine(plain), [asked(case, scored=True)]))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_all_in_one_batch(plain: Launched, depth: int) -> None:
    check(run(engine(plain, Tight(depth=depth)), [asked(i, scored=True) for i in range(len(CASES))]))


def test_prompts_in_chunks_of_sixteen(plain: Launched) -> None:
    check(run(engine(plain, Tight(tokens=16)), [asked(i, scored=True) for i in range(len(CASES))]))


def test_with_prefix_hits_and_without(plain: Launched) -> None:
    cached = engine(plain)
    for _ in range(2):
        check(run(cached, [asked(i) for i in range(len(CASES))]))
    assert cached.scheduler.counts.prefix_hits > 0
    check(run(engine(plain, Tight(caching=False)), [asked(i) for i in range(len(CASES))]))


def preempting() -> Tight:
    return Tight(pages=-(-LONGEST // 16) + 3)


def test_a_pool_that_preempts(plain: Launched) -> None:
    tight = engine(plain, preempting())
    check(run(tight, [asked(i) for i in range(len(CASES))]))
    assert tight.scheduler.counts.preemptions > 0


def test_deterministic_means_bit_for_bit(exact: Launched) -> None:
    """Alone, together, chunked, preempted, cached, whatever the depth: the same logprobs to the last bit."""
    some = [replace(r, params=r.params.clone(max_tokens=24)) for r in map(asked, (4, 5, 6, 7, 1))]
    want = {one.id: run(engine(exact), [one])[one.id].outputs for one in some}
    roomy, tight = engine(exact, Tight(depth=1)), engine(exact, Tight(pages=7))
    for e in (roomy, roomy, tight, engine(exact, Tight(depth=3, tokens=16, caching=False))):
        assert {name: out.outputs for name, out in run(e, some).items()} == want
    assert roomy.scheduler.counts.prefix_hits > 0 and tight.scheduler.counts.preemptions > 0


def test_seeded_tokens_do_not_depend_on_batch_mates(exact: Launched) -> None:
    mine = Request(
        "mine", CASES[1].prompt, SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, logprobs=1)
    )
    alone = run(engine(exact), [mine])["mine"]
    others = [
        Request(f"o{i}", CASES[i % len(CASES)].prompt[i // 4 :], SamplingParams(temperature=1.0, max_tokens=8 + i))
        for i in range(15)
    ]
    assert run(engine(exact), [*others[:7], mine, *others[7:]])["mine"].outputs == alone.outputs
