"""The host half against a device that can be computed by hand: invariants on random traces, and the rules by name."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import scheduling
from tests.fake_executor import continuation
from tests.worlds import BOUNDS, world

LONGEST = 48
"""Tokens of the longest sequence in a random trace, rounded up to whole pages."""


def trace(seed: int) -> None:
    """Random requests come, end, are aborted; the device checks each step, the end checks the answers."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (9,), (1,), (None, 9), (9, None)])
    chunked, page = rng.random() < 0.9, rng.choice([2, 4])
    w = world(
        rows=rng.randint(1, 5),
        tokens=rng.randint(5, 24) if chunked else 50,
        page=page,
        pages=1 + LONGEST // page + rng.choice([0, 1, 2, 5, 10, 30]),
        depth=rng.randint(1, 3),
        caching=rng.random() < 0.8,
        chunked=chunked,
        windows=windows,
    )
    stems = [[rng.randrange(64) for _ in range(rng.randint(1, 20))] for _ in range(3)]
    asked: dict[str, tuple[list[int], int, bool]] = {}
    aborted: set[str] = set()
    for i in range(rng.randint(1, 9)):
        prompt = rng.choice(stems)[: rng.randint(1, 20)] + [rng.randrange(64) for _ in range(rng.randint(0, 6))]
        most, ignore = rng.randint(1, 20), rng.random() < 0.5
        n = rng.choice([1, 1, 1, 2])
        w.add(str(i), prompt, max_tokens=most, ignore_eos=ignore, n=n, priority=rng.choice([0, 0, 1]))
        asked.update({f"{i}.{k}": (prompt, most, ignore) for k in range(n)})
        for _ in range(rng.randint(0, 6)):
            w.step()
            w.check()
        if rng.random() < 0.2:
            gone = str(rng.randint(0, i))
            w.abort(gone)
            aborted.add(gone)
            w.check()
    w.run()
    w.check()
    s = w.engine.scheduler
    assert s.waiting == 0 and not s.running and all(pool.free == pool.total for pool in s.pools)
    for name, (prompt, most, ignore) in asked.items():
        want = continuation(prompt, most, frozenset() if ignore else frozenset(BOUNDS.eos))
        got = w.said.get(name, [])
        if w.reasons[name] == "abort":
            assert name.split(".")[0] in aborted
            assert got == want[: len(got)]
        else:
            assert got == want
            assert w.reasons[name] == ("stop" if got[-1] in BOUNDS.eos and not ignore else "length")


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_random_traces(seed: int) -> None:
    trace(seed)


@pytest.mark.parametrize("depth", [1, 2])
def test_continuous_batching_takes_as_many_steps_as_the_longest_answer(depth: int) -> None:
    got, naive = scheduling.serve(depth=depth), scheduling.serve(depth=depth, page=scheduling.CONTEXT, static=True)
    assert (got.steps, got.slots, got.tokens) == (40, 960, sum(scheduling.ANSWERS))
    assert (naive.steps, naive.slots, naive.tokens) == (75, 16_384, sum(scheduling.ANSWERS))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_results_belong_to_the_sequence_not_to_the_row(depth: int) -> None:
    w = world(rows=1, depth=depth)
    for i in range(3):
        w.add(str(i), [i + 10, i], max_tokens=3, ignore_eos=True)
    w.run()
    for i in range(3):
        assert w.said[f"{i}.0"] == continuation([i + 10, i], 3)


def test_preempted_sequence_waits_for_its_results_and_answers_alike() -> None:
    w = world(rows=4, tokens=64, page=2, pages=14, depth=3)
    for i in range(3):
        w.add(str(i), [i, i + 1, i + 2], max_tokens=9, ignore_eos=True)
    while w.engine.busy:
        w.step()
        for s in w.engine.scheduler.running:
            assert s.pending <= 3
        w.check()
    assert w.engine.scheduler.counts.preemptions > 0
    for i in range(3):
        assert w.said[f"{i}.0"] == continuation([i, i + 1, i + 2], 9)


def test_the_last_one_is_preempted_first() -> None:
    w = world(rows=3, tokens=64, page=2, pages=14, depth=1)
    w.add("low", [1, 2, 3], max_tokens=12, ignore_eos=True, priority=5)
    w.add("old", [4, 5, 6], max_tokens=12, ignore_eos=True)
    w.add("new", [7, 8, 9], max_tokens=12, ignore_eos=True)
    ended: list[str] = []
    while w.engine.busy:
        w.step()
        ended += [name for name in w.reasons if name not in ended]
    assert ended == ["old.0", "new.0", "low.0"]


def test_prompt_pages_are_hit_by_later_steps_only() -> None:
    w = world(rows=4, tokens=64, page=4, pages=40, depth=2)
    prompt = list(range(17))
    for i in range(4):
        w.add(str(i), prompt, max_tokens=4, ignore_eos=True)
    w.run()
    admissions = [a for plan in w.device.steps for a in plan.admissions]
    assert [len(a.cached) for a in admissions] == [0, 16, 16, 16]
    first = next(i for i, plan in enumerate(w.device.steps) if plan.admissions)
    assert len(w.device.steps[first].admissions) == 1
    assert w.engine.scheduler.counts.prompt_tokens == 17 + 3


def test_a_hit_leaves_one_token_to_compute() -> None:
    w = world(page=4)
    for name in ("a", "b"):
        w.add(name, list(range(8)), max_tokens=1)
        w.run()
    admissions = [a for plan in w.device.steps for a in plan.admissions]
    assert [len(a.cached) for a in admissions] == [0, 4]


def test_sampled_pages_are_published_at_commit() -> None:
    w = world(page=4, pages=60)
    w.add("a", list(range(6)), max_tokens=8, stop_token_ids=[continuation(list(range(6)), 7)[-1]], ignore_eos=True)
    w.run()
    text = list(range(6)) + w.said["a.0"]
    w.add("b", text, max_tokens=1)
    w.run()
    assert len(w.device.steps[-1].admissions[0].cached) == 12


def test_salts_do_not_share() -> None:
    w = world(page=4)
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x"), ("d", None)):
        w.add(name, list(range(9)), max_tokens=1, cache_salt=salt)
        w.run()
    assert [len(p.admissions[0].cached) for p in w.device.steps if p.admissions] == [0, 0, 8, 0]


def test_the_row_of_a_certain_end_is_free_at_launch() -> None:
    w = world(rows=1, tokens=16, depth=2)
    w.add("a", [1, 2], max_tokens=1, ignore_eos=True)
    w.add("b", [3, 4], max_tokens=1, ignore_eos=True)
    w.engine.step()
    assert w.engine.scheduler.running == [] and "a.0" not in w.said
    w.run()
    assert len(w.device.steps) == 2


def test_a_row_that_may_stop_runs_one_step_too_many_at_most() -> None:
    prompt = [5, 6]
    stop = continuation(prompt, 3)[-1]
    w = world(rows=1, depth=2)
    w.add("a", prompt, max_tokens=20, stop_token_ids=[stop], ignore_eos=True)
    w.run()
    assert w.said["a.0"] == continuation(prompt, 20, frozenset([stop]))
    assert len(w.device.steps) <= len(w.said["a.0"]) + 1


def test_replaying_the_events_gives_the_same_plans() -> None:
    plans = []
    for _ in range(2):
        w = world(rows=3, tokens=9, page=2, pages=24)
        for i in range(6):
            w.add(str(i), [i % 2] * (3 + i), max_tokens=6)
        w.run()
        plans.append(w.device.steps)
    assert plans[0] == plans[1]


def test_a_long_prompt_leaves_running_sequences_their_token() -> None:
    """Even one that comes before them in the order of service."""
    w = world(rows=4, tokens=8, page=4, pages=80, depth=1)
    w.add("a", [1], max_tokens=30, ignore_eos=True, priority=1)
    w.step()
    w.add("long", list(range(60)), max_tokens=2, ignore_eos=True)
    w.run()
    chunks = [{c.sequence: c.count for c in plan.chunks} for plan in w.device.steps]
    assert chunks[1:10] == [{0: 1, 1: 7}] * 8 + [{0: 1, 1: 4}]


def test_windows_hold_no_more_pages_than_they_look_at() -> None:
    w = world(rows=1, tokens=4, page=2, pages=110, windows=(8,))
    w.add("a", [1, 2, 3], max_tokens=150, ignore_eos=True)
    most = 0
    while w.engine.busy:
        w.step()
        pool = w.engine.scheduler.pools[0]
        most = max(most, pool.total - pool.free)
    assert w.said["a.0"] == continuation([1, 2, 3], 150)
    assert most <= 8


def test_kv_waste_is_less_than_a_page_beyond_what_is_launched() -> None:
    w = world(rows=4, tokens=16, page=4, pages=60)
    for i in range(6):
        w.add(str(i), list(range(3 + 2 * i)), max_tokens=9, ignore_eos=True)
    while w.engine.busy:
        w.step()
        for s in w.engine.scheduler.running:
            assert len(s.pages[0]) * 4 - s.launched < 4


@pytest.mark.parametrize(("pages", "admitted"), [(8, 2), (9, 2), (10, 3)])
def test_admission_leaves_running_sequences_the_pages_they_need_next(pages: int, admitted: int) -> None:
    """Two need a page each in the next step, one more is a reserve; whoever would take those waits."""
    w = world(rows=3, tokens=16, page=2, pages=pages, depth=1, caching=False)
    for name in ("a", "b"):
        w.add(name, [1, 2], max_tokens=3, ignore_eos=True)
    w.add("late", list(range(10, 18)), max_tokens=3, ignore_eos=True)
    w.step()
    assert len(w.device.steps[0].admissions) == admitted
    w.run()
    assert w.engine.scheduler.counts.preemptions == 0


def test_the_page_that_the_stop_token_fills_is_found_by_the_next_turn() -> None:
    """The step that wrote it was launched before anyone knew that the sequence had ended."""
    prompt = list(range(6))
    answer = continuation(prompt, 6)
    assert answer[-1] not in answer[:-1]
    w = world(page=4, depth=2)
    w.add("a", prompt, max_tokens=20, stop_token_ids=[answer[-1]], ignore_eos=True)
    w.run()
    w.add("b", [*prompt, *answer, 1], max_tokens=1)
    w.run()
    assert len(w.device.steps[-1].admissions[0].cached) == 12
