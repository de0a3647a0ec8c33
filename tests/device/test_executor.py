"""The device half on tiny models in float32: however a token's computation is cut, its logits are the same."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.types import RequestOutput
from tests.device.engines import request, run, start, tokens
from tests.models.cases import CASES, Case

PROMPTS = [[(7 * i + k) % 90 + 1 for k in range(n)] for i, n in enumerate([1, 5, 8, 17, 23, 30])]


def logprobs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("budget", [256, 7], ids=["whole", "chunked"])
def test_prompt_logprobs_equal_transformers(case: Case, budget: int) -> None:
    """Every recorded sequence as a prompt, in one go and in chunks, in one batch."""
    launched = start(case.name, max_num_batched_tokens=budget, max_num_seqs=min(4, budget), num_pages=60)
    recorded = [r for r in case.recorded() if r.prompt_len == len(r.ids)]
    asked = [
        request(str(i), r.ids.tolist(), max_tokens=1, prompt_logprobs=0)
        for i, r in enumerate(recorded)
        if len(r.ids) < launched.engine.bounds.max_model_len
    ]
    assert asked
    done = run(launched, asked)
    for name, out in done.items():
        want = logprobs(recorded[int(name)].logits)
        ids = out.prompt_token_ids
        got = [entry[ids[i + 1]].logprob for i, entry in enumerate(out.prompt_logprobs[1:]) if entry]  # type: ignore[index]
        np.testing.assert_allclose(got, [want[i, ids[i + 1]] for i in range(len(ids) - 1)], atol=1e-3)
    launched.engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_token_by_token_equals_transformers(case: Case) -> None:
    """The tokens after the prompt are forced one by one; each step's logprob is compared."""
    recorded = [r for r in case.recorded() if r.prompt_len < len(r.ids)][:1]
    if not recorded:
        recorded = case.recorded()[:1]
    launched = start(case.name, num_pages=60)
    r = recorded[0]
    ids = r.ids.tolist()
    first = min(r.prompt_len, len(ids) - 1)
    want = logprobs(r.logits)
    if r.prompt_len < len(ids):
        got = forced(launched, ids, first)
        np.testing.assert_allclose(got, [want[i - 1, ids[i]] for i in range(first, len(ids))], atol=1e-3)
    launched.engine.close()


def forced(launched, ids: list[int], first: int) -> list[float]:  # noqa: ANN001 - Launched
    """Logprob of each of ids[first:], when it is generated because nothing else is allowed."""
    got: list[float] = []
    out = run(
        launched, [request("f", ids[:first], max_tokens=len(ids) - first, logprobs=0, logit_bias={ids[first]: 100.0})]
    )["f"]
    # A bias forces one token only, so the chain is walked by growing the prompt and reading the next token's logprob.
    del out
    for i in range(first, len(ids)):
        answer = run(launched, [request(f"s{i}", ids[:i], max_tokens=1, logprobs=0, allowed_token_ids=[ids[i]])])[f"s{i}"]
        entries = answer.outputs[0].logprobs
        assert entries is not None
        got.append(entries[0][ids[i]].logprob)
    return got


def answers(name: str = "llama3", **options: object) -> dict[str, tuple[int, ...]]:
    launched = start(name, **options)
    found = tokens(run(launched, [request(str(i), p) for i, p in enumerate(PROMPTS)]))
    assert not launched.engine.scheduler.running
    assert all(pool.free == pool.total for pool in launched.engine.scheduler.pools)
    launched.engine.close()
    return found


@pytest.fixture(scope="module")
def plain() -> dict[str, tuple[int, ...]]:
    return answers()


@pytest.mark.parametrize("depth", [1, 3])
def test_depth_changes_nothing(plain: dict[str, tuple[int, ...]], depth: int) -> None:
    assert answers(steps_in_flight=depth) == plain


def test_chunks_change_nothing(plain: dict[str, tuple[int, ...]]) -> None:
    assert answers(max_num_batched_tokens=5) == plain


def test_preemption_changes_nothing(plain: dict[str, tuple[int, ...]]) -> None:
    launched = start("llama3", num_pages=9, max_model_len=48)
    assert tokens(run(launched, [request(str(i), p) for i, p in enumerate(PROMPTS)])) == plain
    assert launched.engine.scheduler.counts.preemptions > 0
    launched.engine.close()


def test_prefix_hits_change_nothing(plain: dict[str, tuple[int, ...]]) -> None:
    launched = start("llama3")
    for _ in range(2):
        assert tokens(run(launched, [request(str(i), p) for i, p in enumerate(PROMPTS)])) == plain
    assert launched.engine.scheduler.counts.prefix_hits > 0
    launched.engine.close()


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama3", "qwen3", "mistral"])
def test_tensor_parallel_equals_one_device(name: str, ways: int) -> None:
    if ways > 4:
        pytest.skip("the tiny checkpoints have four heads")
    assert answers(name, tensor_parallel_size=ways) == answers(name)


@pytest.mark.parametrize("name", ["qwen2_window", "qwen3_alternating", "mistral"])
def test_windows_with_two_cache_groups(name: str) -> None:
    assert answers(name, num_pages=60) == answers(name, num_pages=60, enable_prefix_caching=False, steps_in_flight=1)


def test_the_penalties_know_cached_and_replayed_tokens() -> None:
    """Counts on the device come from prompts found in the cache, and after a preemption from the replay."""
    ask = [
        request(str(i), p, repetition_penalty=1.7, frequency_penalty=0.5, presence_penalty=0.3) for i, p in enumerate(PROMPTS)
    ]
    roomy = start("llama3")
    want = tokens(run(roomy, ask))
    assert tokens(run(roomy, ask)) == want
    assert roomy.engine.scheduler.counts.prefix_hits > 0
    tight = start("llama3", num_pages=9, max_model_len=48)
    assert tokens(run(tight, ask)) == want
    assert tight.engine.scheduler.counts.preemptions > 0


def test_seeds_do_not_depend_on_batch_mates() -> None:
    launched = start("llama3", deterministic=True)
    alone = run(launched, [request("a", PROMPTS[3], temperature=1.0, seed=7, n=2)])
    beside = run(
        launched,
        [request("a", PROMPTS[3], temperature=1.0, seed=7, n=2)]
        + [request(str(i), p, temperature=1.2) for i, p in enumerate(PROMPTS)],
    )
    assert tokens(alone) == {k: v for k, v in tokens(beside).items() if k.startswith("a")}
    assert alone["a"].outputs[0].token_ids != alone["a"].outputs[1].token_ids
    launched.engine.close()


def test_every_limit_of_a_row_takes_effect() -> None:
    launched = start("llama3")
    prompt = PROMPTS[3]
    greedy = run(launched, [request("g", prompt)])["g"].outputs[0].token_ids

    def ask(**params: object) -> RequestOutput:
        return run(launched, [request("x", prompt, **params)])["x"]

    assert ask(logit_bias={5: 100.0}).outputs[0].token_ids == (5,) * 12
    assert ask(logit_bias={greedy[0]: -100.0}).outputs[0].token_ids[0] != greedy[0]
    assert set(ask(allowed_token_ids=[3, 4]).outputs[0].token_ids) <= {3, 4}
    stopped = ask(stop_token_ids=[greedy[2]])
    first = greedy.index(greedy[2])
    assert stopped.outputs[0].token_ids == greedy[: first + 1]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", greedy[2])
    late = ask(stop_token_ids=[greedy[2]], min_tokens=first + 4)
    assert len(late.outputs[0].token_ids) >= first + 4
    assert greedy[2] not in late.outputs[0].token_ids[: first + 3]
    assert len(set(ask(frequency_penalty=2.0, presence_penalty=2.0).outputs[0].token_ids)) > len(set(greedy)) - 1
    launched.engine.close()


def test_bad_words_of_several_tokens() -> None:
    launched = start("llama3")
    prompt = PROMPTS[3]
    greedy = run(launched, [request("g", prompt)])["g"].outputs[0].token_ids
    engine = launched.engine
    banned = (greedy[1], greedy[2])
    engine.add(request("b", prompt), (banned,))
    said: list[int] = []
    while engine.busy:
        for out in engine.step():
            said += out.outputs[0].token_ids
    assert greedy[0] == said[0] and greedy[1] == said[1] and said[2] != greedy[2]
    assert not any(tuple(said[i : i + 2]) == banned for i in range(len(said)))
    engine.close()
