"""What callers and observers are told, over a device whose answers and scores can be computed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.types import InvalidRequest, Logprob, TokenLogprobs
from tests.fake_executor import TOP, Letters, continuation, likeliest, logprob_of, rank_of
from tests.worlds import BOUNDS, Told, World, world

PROMPT = [5, 6, 7, 8, 9, 10]
LETTERS = Letters()


def text_of(tokens: Sequence[int]) -> str:
    return "".join(map(LETTERS.token_text, tokens))


def scored(text: Sequence[int], token: int, count: int) -> TokenLogprobs:
    """What is to be said of `token` after `text`."""
    rank = rank_of(token, text)
    want = {token: Logprob(logprob_of(rank), rank, LETTERS.token_text(token))}
    for i, other in enumerate(likeliest(text, TOP if count < 0 else count), start=1):
        want.setdefault(other, Logprob(logprob_of(i), i, LETTERS.token_text(other)))
    return want


@pytest.mark.parametrize("count", [0, 1, 4, -1])
def test_logprobs_have_the_token_first_then_the_likeliest(count: int) -> None:
    w = world()
    if count < 0:
        with pytest.raises(InvalidRequest, match=r"logprobs must be in 0\.\.5"):
            w.add("a", PROMPT, logprobs=count)
        count = BOUNDS.max_logprobs
    w.add("a", PROMPT, max_tokens=7, logprobs=count, ignore_eos=True)
    w.add("other", [1], max_tokens=3)
    w.run()
    (choice,) = w.answer("a").outputs
    tokens = continuation(PROMPT, 7)
    want = [scored(PROMPT + tokens[:i], token, count) for i, token in enumerate(tokens)]
    assert choice.logprobs is not None and list(choice.logprobs) == want
    assert [list(entry) for entry in choice.logprobs] == [list(entry) for entry in want], "in this order"
    assert choice.cumulative_logprob == pytest.approx(7 * logprob_of(3))
    (other,) = w.answer("other").outputs
    assert other.logprobs is None and other.cumulative_logprob is None


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("tokens", [4, 7, 64])
def test_prompt_logprobs_are_joined_over_chunks(count: int, tokens: int) -> None:
    w = world(tokens=tokens)
    prompt = PROMPT * 3
    w.add("before", prompt, max_tokens=1)
    w.run()
    w.add("a", prompt, max_tokens=3, prompt_logprobs=count, n=2, ignore_eos=True)
    w.run()
    outputs = [out for out in w.outputs if out.request_id == "a"]
    assert outputs[0].prompt_logprobs is not None and all(out.prompt_logprobs is None for out in outputs[1:])
    first, *rest = outputs[0].prompt_logprobs
    assert first is None
    assert rest == [scored(prompt[:i], prompt[i], count) for i in range(1, len(prompt))]
    assert w.answer("a").num_cached_tokens == 0, "what is cached has no scores"


def test_prompt_logprobs_and_logprobs_survive_preemption() -> None:
    w = world(rows=3, tokens=5, page=2, pages=16, depth=3)
    prompts = [[i, *PROMPT] for i in range(3)]
    for i, prompt in enumerate(prompts):
        w.add(str(i), prompt, max_tokens=12, logprobs=1, prompt_logprobs=1, ignore_eos=True)
    w.run()
    assert w.engine.scheduler.counts.preemptions > 2
    for i, prompt in enumerate(prompts):
        answer, tokens = w.answer(str(i)), continuation(prompt, 12)
        (choice,) = answer.outputs
        assert choice.token_ids == tuple(tokens) and choice.text == text_of(tokens)
        assert list(choice.logprobs or ()) == [scored(prompt + tokens[:k], t, 1) for k, t in enumerate(tokens)]
        assert list(answer.prompt_logprobs or ())[1:] == [scored(prompt[:k], prompt[k], 1) for k in range(1, 7)]


def test_the_choices_of_a_request_compute_its_prompt_once() -> None:
    w = world(rows=4, tokens=64, page=4)
    w.add("a", PROMPT * 3, n=3, max_tokens=5, ignore_eos=True)
    w.run()
    answer = w.answer("a")
    assert [o.index for o in answer.outputs] == [0, 1, 2] and answer.finished
    assert {o.token_ids for o in answer.outputs} == {tuple(continuation(PROMPT * 3, 5))}
    assert w.engine.scheduler.counts.prompt_tokens == 18 + 2 * (18 - 16)
    seeds = {a.seed for plan in w.device.steps for a in plan.admissions}
    assert len(seeds) == 3


def test_reasons() -> None:
    tokens = continuation(PROMPT, 9)
    stop = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    at = tokens.index(stop)
    cases: dict[str, tuple[dict[str, object], int, str, int | str | None]] = {
        "length": ({}, 9, "length", None),
        "token": ({"stop_token_ids": [stop]}, at + 1, "stop", stop),
        "string": ({"stop": [text_of(tokens[2:4])]}, 4, "stop", text_of(tokens[2:4])),
        "last token": ({"stop": [text_of(tokens[8:9])]}, 9, "stop", text_of(tokens[8:9])),
        "token and string": ({"stop_token_ids": [stop], "stop": [text_of([stop])]}, at + 1, "stop", stop),
        "held back": ({"stop": [text_of(tokens[7:9]) + "?"]}, 9, "length", None),
    }
    for name, (params, count, reason, stop_reason) in cases.items():
        w = world()
        w.add(name, PROMPT, max_tokens=9, ignore_eos=True, **params)
        w.run()
        w.check()
        (choice,) = w.answer(name).outputs
        assert (len(choice.token_ids), choice.finish_reason, choice.stop_reason) == (count, reason, stop_reason), name
        shown = {"length": 9, "token": at, "string": 2, "last token": 8, "token and string": at, "held back": 9}[name]
        assert choice.text == text_of(tokens[:shown]), name


def test_the_models_own_end_has_no_stop_reason_and_no_text() -> None:
    prompt = next([a, b] for a in range(64) for b in range(64) if continuation([a, b], 3)[-1] in BOUNDS.eos)
    tokens = continuation(prompt, 3)
    assert BOUNDS.eos[0] not in tokens[:2]
    for include, text in ((False, text_of(tokens[:2])), (True, text_of(tokens))):
        w = world()
        w.add("a", prompt, max_tokens=9, include_stop_str_in_output=include)
        w.run()
        (choice,) = w.answer("a").outputs
        assert (choice.finish_reason, choice.stop_reason, choice.text) == ("stop", None, text)
        assert choice.token_ids == tuple(tokens)


def test_stop_tokens_and_strings_wait_for_min_tokens() -> None:
    prompt = next([a] for a in range(64) if len(set(continuation([a], 6))) == 6)
    tokens = continuation(prompt, 6)
    stops: list[dict[str, object]] = [{"stop_token_ids": [tokens[2]]}, {"stop": text_of(tokens[1:3])}]
    for stop in stops:
        lengths: list[int] = []
        for least in (0, 3, 4):
            w = world()
            w.add("a", prompt, max_tokens=6, min_tokens=least, ignore_eos=True, **stop)
            w.run()
            lengths.append(len(w.answer("a").outputs[0].token_ids))
        assert lengths == [3, 3, 6]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_answer_of_one_token(depth: int) -> None:
    """The row is free as soon as the last piece of the prompt is launched, with several of its steps unread."""
    w = world(rows=1, tokens=3, depth=depth)
    for name in ("a", "b"):
        w.add(name, PROMPT, max_tokens=1, ignore_eos=True)
    while w.engine.busy:
        w.step()
        w.check()
    for name in ("a", "b"):
        assert w.answer(name).outputs[0].token_ids == tuple(continuation(PROMPT, 1))
        assert w.reasons[f"{name}.0"] == "length"


def test_observers_are_told_of_steps_and_ends() -> None:
    told = Told()
    w = world(observers=[told], rows=2, tokens=64)
    w.add("a", PROMPT, max_tokens=5, ignore_eos=True, n=2)
    w.add("b", [1, 2], max_tokens=3, ignore_eos=True)
    w.run()
    assert sum(len(s.first_token_seconds) for s in told.steps) == 2, "one a request"
    assert sum(len(s.inter_token_seconds) for s in told.steps) == 4 + 4 + 2
    assert sum(s.generation_tokens for s in told.steps) == 13
    assert sum(s.prompt_tokens for s in told.steps) == w.engine.scheduler.counts.prompt_tokens == 6 + 2 + 2
    assert (sum(s.prefix_queries for s in told.steps), sum(s.prefix_hits for s in told.steps)) == (14, 4)
    assert max(s.running for s in told.steps) == 2 and told.steps[0].waiting + told.steps[0].running >= 2
    assert (told.steps[-1].running, told.steps[-1].waiting, told.steps[-1].pages_used) == (0, 0, 0)
    assert {s.pages_total for s in told.steps} == {39} and max(s.pages_used for s in told.steps) > 0
    ends = [(r.finish_reason, r.prompt_tokens, r.cached_tokens, r.output_tokens, r.n, r.max_tokens) for r in told.ended]
    assert sorted(ends) == [("length", 2, 0, 3, 1, 3), ("length", 6, 0, 10, 2, 5)]
    for r in told.ended:
        assert 0 < r.times.first_scheduled <= r.times.first_token <= r.times.last_token <= r.finished


def test_observers_are_told_of_preemptions_and_aborts() -> None:
    told = Told()
    w = world(observers=[told], rows=4, tokens=64, page=2, pages=14, depth=3)
    for i in range(3):
        w.add(str(i), [i, i + 1, i + 2], max_tokens=9, ignore_eos=True)
    while not w.engine.scheduler.counts.preemptions:
        w.step()
    w.abort("2")
    w.check()
    w.run()
    assert sum(s.preemptions for s in told.steps) == w.engine.scheduler.counts.preemptions > 0
    assert [r.finish_reason for r in told.ended] == ["abort", "length", "length"]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(14))
def test_abort_at_any_moment(steps: int, depth: int) -> None:
    """Waiting, in its prompt, decoding, preempted, released with results unread: rows and pages are free at once."""
    told = Told()
    w = world(rows=3, tokens=5, page=2, pages=18, depth=depth, observers=[told])
    for i in range(3):
        w.add(str(i), [i, *PROMPT], max_tokens=6, ignore_eos=True, n=2 if i == 1 else 1)
    for _ in range(steps):
        w.step()
    for name in ("1", "2"):
        before = w.answer(name) if any(out.request_id == name for out in w.outputs) else None
        last = w.abort(name)
        w.check()
        if before is not None and before.finished:
            assert last is None
            continue
        assert last is not None and last.finished
        done = {o.index for o in before.outputs if o.finished()} if before else set[int]()
        assert [o.index for o in last.outputs] == [i for i in range(2 if name == "1" else 1) if i not in done]
        assert all(o.finish_reason == "abort" for o in last.outputs)
        assert w.abort(name) is None
    assert not {s.request.id for s in w.engine.scheduler.running} & {"1", "2"}
    w.run()
    w.check()
    assert len(told.ended) == 3
    assert w.answer("0").outputs[0].token_ids == tuple(continuation([0, *PROMPT], 6))
    assert w.engine.scheduler.waiting == 0 and all(pool.free == pool.total for pool in w.engine.scheduler.pools)


def test_abort_gives_the_text_that_was_held_back() -> None:
    tokens = continuation(PROMPT, 9)
    w = world(depth=1)
    w.add("a", PROMPT, max_tokens=9, stop=text_of(tokens[:4]), ignore_eos=True)
    for _ in range(3):
        (out,) = w.step()
        assert out.outputs[0].text == ""
    last = w.abort("a")
    assert last is not None
    assert (last.outputs[0].text, last.outputs[0].token_ids) == (text_of(tokens[:3]), ())
    assert w.answer("a").outputs[0].token_ids == tuple(tokens[:3])


def test_an_id_may_be_used_again_while_results_of_an_aborted_request_are_unread() -> None:
    w = world(rows=1, tokens=4, depth=3)
    w.add("a", PROMPT * 2, max_tokens=4, prompt_logprobs=1)
    w.step(), w.step()
    assert w.engine.abort("a") is not None
    w.add("a", [1, 2], max_tokens=2, prompt_logprobs=1, logprobs=0, ignore_eos=True)
    w.run()
    answer = w.answer("a")
    assert answer.outputs[0].token_ids == tuple(continuation([1, 2], 2))
    assert answer.prompt_logprobs == (None, scored([1], 2, 1))


def test_an_id_in_use_is_refused() -> None:
    w = world()
    w.add("a", PROMPT)
    with pytest.raises(InvalidRequest, match="in use"):
        w.add("a", PROMPT)


def serve(w: World, rng: random.Random) -> None:
    """Random requests that ask for scores and stop in every way, checked against what they would say alone."""
    asked: dict[str, tuple[list[int], int, list[str]]] = {}
    for i in range(rng.randint(1, 6)):
        prompt = PROMPT[: rng.randint(1, 6)] + [rng.randrange(64) for _ in range(rng.randint(0, 4))]
        count = rng.randint(1, 10)
        tokens = continuation(prompt, count)
        at = rng.randrange(count)
        stops = [text_of(tokens[at : at + rng.randint(1, 2)])] if rng.random() < 0.7 else []
        w.add(
            str(i), prompt, max_tokens=count, stop=stops, logprobs=1, ignore_eos=True,
            prompt_logprobs=rng.choice([None, 1]),
        )  # fmt: skip
        asked[str(i)] = (prompt, count, stops)
        for _ in range(rng.randint(0, 4)):
            w.step()
            w.check()
    w.run()
    for name, (prompt, count, stops) in asked.items():
        answer = w.answer(name)
        (choice,) = answer.outputs
        tokens = continuation(prompt, count)
        used = next((k for k in range(1, count + 1) if any(s in text_of(tokens[:k]) for s in stops)), count)
        text = text_of(tokens[:used])
        assert choice.token_ids == tuple(tokens[:used])
        assert choice.text == (text[: text.index(stops[0])] if stops and stops[0] in text else text)
        assert list(choice.logprobs or ()) == [scored(prompt + tokens[:k], tokens[k], 1) for k in range(used)]
        if answer.prompt_logprobs is not None:
            assert answer.prompt_logprobs[1:] == tuple(scored(prompt[:k], prompt[k], 1) for k in range(1, len(prompt)))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_answers(seed: int) -> None:
    rng = random.Random(seed)
    rows, tokens, pages, depth = rng.randint(1, 4), rng.randint(4, 16), rng.randint(14, 30), rng.randint(1, 3)
    serve(world(rows=rows, tokens=tokens, page=2, pages=pages, depth=depth), rng)
