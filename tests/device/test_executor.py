"""A real engine on tiny models in float32: whatever else happens to a request, its answer is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.launching import Launched
from jaxserve.types import Request, RequestOutput
from tests.device.engines import Tight, engine, request, run, start, tokens

PROMPTS = [[(7 * i + k * k) % 90 + 1 for k in range(n)] for i, n in enumerate([1, 5, 8, 17, 23, 30])]
TIGHT_PAGES = 9


@pytest.fixture(scope="module")
def llama() -> Iterator[Launched]:
    launched = start("llama3")
    yield launched
    launched.engine.close()


@pytest.fixture(scope="module")
def exact() -> Iterator[Launched]:
    launched = start("llama3", deterministic=True)
    yield launched
    launched.engine.close()


def ask(**params: object) -> list[Request]:
    return [request(str(i), p, **params) for i, p in enumerate(PROMPTS)]


def same(launched: Launched, tight: Tight, want: dict[str, tuple[int, ...]], **params: object) -> Tight:
    assert tokens(run(engine(launched, tight), ask(**params))) == want
    return tight


VARIANTS = {
    "depth 1": Tight(depth=1),
    "depth 3": Tight(depth=3),
    "chunks": Tight(tokens=5),
    "one row": Tight(rows=1),
    "no cache": Tight(caching=False),
    "preempted": Tight(pages=TIGHT_PAGES),
    "preempted, chunks, depth 3": Tight(pages=TIGHT_PAGES, tokens=6, depth=3),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("exactly", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 1.0, "seed": 5, "n": 2},
        {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    ],
    ids=["greedy", "seeded", "penalties"],
)
def test_nothing_changes_the_answer(
    llama: Launched, exact: Launched, variant: str, exactly: bool, params: dict[str, object]
) -> None:
    launched = exact if exactly else llama
    want = tokens(run(engine(launched), ask(**params)))
    assert tokens(run(engine(launched, VARIANTS[variant]), ask(**params))) == want


def test_alone_and_among_others(exact: Launched) -> None:
    for params in ({}, {"temperature": 1.0, "seed": 7, "n": 2}, {"temperature": 0.7, "top_p": 0.8, "seed": 1}):
        mine = request("mine", PROMPTS[3], logprobs=2, **params)
        alone = run(engine(exact), [mine])["mine"]
        others = [request(str(i), p, temperature=1.2) for i, p in enumerate(PROMPTS * 2)]
        beside = run(engine(exact), [*others[:5], mine, *others[5:]])["mine"]
        assert alone.outputs == beside.outputs


def test_preemption_and_hits_really_happen(llama: Launched) -> None:
    tight = engine(llama, Tight(pages=TIGHT_PAGES))
    run(tight, ask())
    assert tight.scheduler.counts.preemptions > 0
    roomy = engine(llama)
    run(roomy, ask())
    before = roomy.scheduler.counts.prefix_hits
    again = run(roomy, ask())
    assert roomy.scheduler.counts.prefix_hits > before
    assert again["5"].num_cached_tokens == 24


def test_penalties_know_cached_tokens(llama: Launched) -> None:
    params = {"repetition_penalty": 1.7, "frequency_penalty": 0.5, "presence_penalty": 0.3}
    e = engine(llama)
    first = tokens(run(e, ask(**params)))
    assert tokens(run(e, ask(**params))) == first
    assert first != tokens(run(engine(llama), ask()))


def test_prompt_logprobs_over_chunks_and_preemptions(llama: Launched) -> None:
    want = run(engine(llama), ask(prompt_logprobs=3))
    got = run(engine(llama, Tight(tokens=5, pages=TIGHT_PAGES)), ask(prompt_logprobs=3))
    for name, out in want.items():
        other = got[name].prompt_logprobs
        assert out.prompt_logprobs is not None and other is not None
        assert len(out.prompt_logprobs) == len(out.prompt_token_ids)
        for a, b in zip(out.prompt_logprobs[1:], other[1:], strict=True):
            assert a is not None and b is not None and a.keys() == b.keys()
            assert all(abs(a[t].logprob - b[t].logprob) < 1e-3 for t in a)


def test_every_limit_of_a_row_takes_effect(llama: Launched) -> None:
    prompt, e = PROMPTS[3], engine(llama)
    greedy = run(e, [request("g", prompt)])["g"].outputs[0].token_ids

    def answer(**params: object) -> RequestOutput:
        beside = request("plain", prompt)
        done = run(e, [request("x", prompt, **params), beside])
        assert done["plain"].outputs[0].token_ids == greedy
        return done["x"]

    assert answer(logit_bias={5: 100.0}).outputs[0].token_ids == (5,) * 12
    assert answer(logit_bias={greedy[0]: -100.0}).outputs[0].token_ids[0] != greedy[0]
    assert set(answer(allowed_token_ids=[3, 4]).outputs[0].token_ids) <= {3, 4}
    stopped = answer(stop_token_ids=[greedy[2]]).outputs[0]
    first = greedy.index(greedy[2])
    assert stopped.token_ids == greedy[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", greedy[2])
    late = answer(stop_token_ids=[greedy[2]], min_tokens=first + 4).outputs[0]
    assert len(late.token_ids) >= first + 4 and greedy[2] not in late.token_ids[: first + 3]


CROWD = [[(5 * i + 3 * k * k) % 90 + 1 for k in range(1 + 3 * i % 29)] for i in range(16)]


def test_penalties_of_some_rows_leave_the_others_alone(exact: Launched) -> None:
    """More sequences than rows: whoever comes next into a row inherits nothing."""
    penal = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3}
    crowd = [request(str(i), p, max_tokens=4 + i, **(penal if i % 3 == 0 else {})) for i, p in enumerate(CROWD)]
    alone = {one.id: run(engine(exact), [one])[one.id].outputs for one in crowd}
    for tight in (Tight(), Tight(pages=TIGHT_PAGES, tokens=9, depth=3)):
        assert {name: out.outputs for name, out in run(engine(exact, tight), crowd).items()} == alone
    plain = run(engine(exact), [request("0", CROWD[-1], max_tokens=19)])["0"].outputs[0]
    assert plain.token_ids != alone["15"][0].token_ids


def test_greedy_rows_among_sampled_ones_take_the_likeliest(llama: Launched) -> None:
    want: dict[str, tuple[int, ...]] = {}
    for _ in range(5):
        mixed = [request(str(i), p, temperature=1.2 * (i % 2), logprobs=2) for i, p in enumerate(CROWD)]
        done = run(engine(llama), mixed)
        greedy = {name: done[name].outputs[0] for name in done if int(name) % 2 == 0}
        want = want or {name: one.token_ids for name, one in greedy.items()}
        assert {name: one.token_ids for name, one in greedy.items()} == want
        for one in greedy.values():
            assert one.logprobs is not None
            assert all(entry[t].rank == 1 for t, entry in zip(one.token_ids, one.logprobs, strict=True))


def test_a_seed_gives_each_choice_its_own_answer_and_the_same_ones_again(llama: Launched) -> None:
    def three(**seed: object) -> list[tuple[int, ...]]:
        found = run(engine(llama), [request("x", PROMPTS[3], n=3, temperature=1.3, **seed)])["x"].outputs
        return [one.token_ids for one in found]

    assert len(set(three(seed=7))) == 3
    assert three(seed=7) == three(seed=7) != three(seed=8)
    assert len({*three(), *three()}) == 6, "two engines without a seed"


@pytest.mark.parametrize("temperature", [0, 0.7, 2])
def test_without_alternatives_the_chosen_token_is_told(llama: Launched, temperature: float) -> None:
    ask = {"temperature": temperature, "seed": 3}
    (full,) = run(engine(llama), [request("x", PROMPTS[3], logprobs=4, **ask)])["x"].outputs
    (bare,) = run(engine(llama), [request("x", PROMPTS[3], logprobs=0, **ask)])["x"].outputs
    assert bare.token_ids == full.token_ids and bare.logprobs is not None and full.logprobs is not None
    ranks: list[int] = []
    for token, one, entry in zip(bare.token_ids, bare.logprobs, full.logprobs, strict=True):
        assert list(one) == [token] and one[token] == entry[token]
        assert -50 < one[token].logprob < 0
        ranks.append(one[token].rank or 0)
    assert max(ranks) > 4 or temperature < 2, "one was drawn that is not among the alternatives"


def test_a_salt_keeps_pages_apart(llama: Launched) -> None:
    e = engine(llama)
    want = run(engine(llama), [request("x", PROMPTS[5])])["x"].outputs
    cached: list[int] = []
    for salt in ("a", "b", "a", None, "b", None):
        out = run(e, [replace(request("x", PROMPTS[5], max_tokens=12), cache_salt=salt)])["x"]
        assert out.outputs == want
        cached.append(out.num_cached_tokens)
    assert cached == [0, 0, 24, 0, 24, 24]


def test_bad_words_of_several_tokens(llama: Launched) -> None:
    prompt, e = PROMPTS[3], engine(llama)
    greedy = run(e, [request("g", prompt)])["g"].outputs[0].token_ids
    banned = (greedy[1], greedy[2])
    e.add(request("b", prompt), (banned,))
    said: list[int] = []
    while e.busy:
        for out in e.step():
            said += out.outputs[0].token_ids
    assert said[:2] == list(greedy[:2])
    assert not any(tuple(said[i : i + 2]) == banned for i in range(len(said)))


def test_nothing_compiles_after_the_launch(llama: Launched) -> None:
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, _, **kw: compiled.append(event))
    e = engine(llama)
    requests = [
        *ask(),
        request("a", PROMPTS[2], temperature=1.0, top_p=0.5, logprobs=2, prompt_logprobs=1, n=2),
        request("b", PROMPTS[4], min_tokens=3, logit_bias={4: 1.0}, frequency_penalty=1.0, allowed_token_ids=[3, 4, 5]),
    ]
    run(e, requests)
    assert not [event for event in compiled if "backend_compile" in event]


def test_another_shape_raises_instead_of_compiling(llama: Launched) -> None:
    with pytest.raises(TypeError):
        llama.executor._programs.score(llama.executor.leaves, np.zeros((3, 3)), np.zeros(3), np.zeros(3))


def test_tensor_parallel_equals_one_device(eight_heads: Path) -> None:
    answers = {}
    for ways in (1, 2, 4, 8):
        launched = start(eight_heads, tensor_parallel_size=ways)
        mixed = [*ask(), request("x", PROMPTS[4], temperature=0.9, top_p=0.9, seed=3, frequency_penalty=1.0)]
        answers[ways] = tokens(run(launched.engine, mixed))
        launched.engine.close()
    assert answers[2] == answers[1] and answers[4] == answers[1] and answers[8] == answers[1]


def test_impossible_ways_are_refused_with_those_that_work(eight_heads: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size 3 .* 1, 2, 4, 8"):
        start(eight_heads, tensor_parallel_size=3)


@pytest.mark.parametrize("name", ["qwen2_window", "qwen3_alternating", "mistral"])
def test_windows_and_two_cache_groups(name: str) -> None:
    launched = start(name)
    want = tokens(run(engine(launched, Tight(caching=False, depth=1)), ask()))
    e = engine(launched)
    for _ in range(2):
        assert tokens(run(e, ask())) == want
    assert tokens(run(engine(launched, Tight(tokens=5, depth=3)), ask())) == want
    launched.engine.close()


def test_reading_a_step_that_samples_nothing_waits_for_its_end(llama: Launched) -> None:
    """Or a long prompt's chunks would all be launched at once, and whoever comes next would wait for all of them."""
    plans = engine(llama, Tight(tokens=8))
    plans.add(request("long", PROMPTS[-1], max_tokens=1))
    plan = plans.scheduler.plan()
    assert plan is not None
    assert plan.emitting == 0
    flight = llama.executor.launch(plan)
    flight.sample()
    result = flight.read()
    assert len(result.tokens) == 0
    assert flight.sampled is not None
    assert flight.sampled.tokens.is_ready()
    assert all(leaf.is_ready() for leaf in jax.tree.leaves((llama.executor._kv, llama.executor._work)))
