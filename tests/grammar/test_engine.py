"""Constraints in the engine, over the device that can be computed by hand: the right text, however it is computed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve import engine
from jaxserve.grammar.constraint import Constraint
from jaxserve.types import Request, SamplingParams
from tests.fake_executor import FakeExecutor, Letters, Row, continuation
from tests.grammar.vocabulary import EOS, constrained, grammar
from tests.worlds import Told, world

FREE = grammar("start: /[a-f]{1,30}/")
KEYS = grammar('start: "abcdef" /[0-2]{2,5}/ "klmno" ("f" | "g")')
"""Some of its tokens are certain, and some are not."""


def prompt_of(i: int) -> list[int]:
    return [5 + i, 9, 2 * i, 7] * (1 + i % 3)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("limits", [{}, {"tokens": 5}, {"pages": 14}], ids=["plain", "chunks", "preempted"])
def test_every_answer_follows_its_grammar_and_nobody_elses(depth: int, limits: dict[str, int]) -> None:
    w = world(depth=depth, **limits)
    wanted: dict[str, list[int]] = {}
    for i in range(6):
        for kind, g in (("free", None), ("one", FREE), ("two", KEYS)):
            name, prompt = f"{kind}{i}", prompt_of(i)
            if g is None:
                w.add(name, prompt, max_tokens=20, ignore_eos=True)
                wanted[f"{name}.0"] = continuation(prompt, 20)
            else:
                w.add(name, prompt, grammar=g, max_tokens=20)
                wanted[f"{name}.0"] = constrained(prompt, 20, Constraint(g))
    while w.engine.busy:
        w.step()
        w.check()
    assert w.said == wanted
    assert not w.engine._constraints
    assert bool(w.engine.scheduler.counts.preemptions) == ("pages" in limits)


def test_tokens_that_are_certain_are_computed_together() -> None:
    g = grammar('start: "abcdefghijklmno"')
    jumps, steps = world(depth=2), world(depth=2)
    jumps.add("a", [5, 6, 7], grammar=g, max_tokens=16)
    steps.add("a", [5, 6, 7], grammar=g, max_tokens=16, logprobs=0)
    few, many = jumps.run(), steps.run()
    assert jumps.said == steps.said == {"a.0": constrained([5, 6, 7], 16, Constraint(g))}
    assert few < 4 < 15 < many
    assert sum(c.count for p in jumps.device.steps for c in p.chunks) <= 3 + 16


def test_what_forbids_tokens_is_asked_even_where_only_one_may_follow() -> None:
    """The device knows what else must not be said; the grammar alone does not."""
    g, letters = grammar('start: "abcdefghijklmno"'), tuple(range(49, 64))
    for banned, allowed in (((50, 49),), None), ((), (EOS, *letters)):
        w = world(depth=2)
        params = SamplingParams(temperature=0, max_tokens=16, allowed_token_ids=allowed)
        w.engine.add(Request("a", (5, 6, 7), params), banned, g)
        assert w.run() >= 16
        assert w.said["a.0"] == constrained([5, 6, 7], 16, Constraint(g))


def test_log_probabilities_are_those_of_the_model_for_the_tokens_it_had_to_say() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=KEYS, max_tokens=20, logprobs=2)
    w.run()
    out = w.answer("a").outputs[0]
    assert out.logprobs is not None
    assert [next(iter(entry)) for entry in out.logprobs] == list(out.token_ids)


def test_prompt_log_probabilities_come_with_certain_tokens() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=KEYS, max_tokens=1, prompt_logprobs=1)
    w.run()
    scores = w.answer("a").prompt_logprobs
    assert scores is not None
    assert [s is None for s in scores] == [True, False, False]


def test_each_choice_has_its_own_place_in_the_grammar() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=KEYS, max_tokens=20, n=3)
    w.run()
    texts = {out.text for out in w.answer("a").outputs}
    assert len(texts) == 1
    assert not w.engine._constraints


def test_a_stop_string_among_certain_tokens_ends_the_answer_there() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=grammar('start: "abcdefghi"'), max_tokens=20, stop="de")
    w.run()
    out = w.answer("a").outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == ("abc", "stop", "de")


def test_min_tokens_are_said_even_if_the_grammar_is_done() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=grammar('start: "ab"'), max_tokens=9, min_tokens=6)
    w.run()
    out = w.answer("a").outputs[0]
    assert len(out.token_ids) >= 6
    assert out.token_ids[:2] == tuple(ord(c) - ord("0") for c in "ab")
    assert set(out.token_ids[2:]) == {EOS}


def test_a_limit_among_certain_tokens_is_kept() -> None:
    for most in range(1, 8):
        w = world(depth=2)
        w.add("a", [5, 6, 7], grammar=grammar('start: "abcdefghi"'), max_tokens=most)
        w.run()
        out = w.answer("a").outputs[0]
        assert (out.text, out.finish_reason) == ("abcdefghi"[:most], "length")


def test_an_answer_that_cannot_go_on_ends_with_an_error_and_disturbs_nobody() -> None:
    w = world(depth=2)
    wrong = Constraint(FREE)
    w.add("bad", [5, 6, 7], grammar=FREE, max_tokens=20)
    w.add("good", [5, 6, 8], max_tokens=10, ignore_eos=True)
    w.step()
    w.engine._constraints[0] = wrong
    wrong.accept(60)  # not in the grammar: what follows is not known any more
    w.run()
    out = w.answer("bad").outputs[0]
    assert out.finish_reason == "error"
    assert "structured_outputs" in str(out.stop_reason)
    assert w.said["good.0"] == continuation([5, 6, 8], 10)
    w.check()


def test_an_aborted_request_leaves_no_constraint() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=FREE, max_tokens=20)
    w.step()
    w.step()
    w.abort("a")
    w.run()
    assert not w.engine._constraints
    w.check()


def test_thinking_is_free_and_a_budget_ends_it() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], grammar=KEYS, max_tokens=30, thinking_token_budget=4, thinking_end="<=>")
    w.run()
    thought, _, answer = w.answer("a").outputs[0].text.partition("<=>")
    assert thought == "".join(Letters().token_text(t) for t in continuation([5, 6, 7], 4))
    assert answer.startswith("abcdef")


def test_a_budget_without_thinking_is_refused() -> None:
    w = world(depth=1)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        w.engine.check(Request("a", (1,), SamplingParams(thinking_token_budget=3)))


def test_a_budget_is_refused_where_nothing_is_free() -> None:
    w = world(depth=1)
    w.engine.bounds = replace(w.engine.bounds, constrain_thinking=True)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        w.add("a", [1], grammar=KEYS, thinking_token_budget=3, thinking_end="<=>")


def test_thinking_may_be_held_to_the_grammar_too() -> None:
    w = world(depth=2)
    w.engine.bounds = replace(w.engine.bounds, constrain_thinking=True)
    w.add("a", [5, 6, 7], grammar=KEYS, thinking_end="<=>", max_tokens=20)
    w.run()
    assert w.said["a.0"] == constrained([5, 6, 7], 20, Constraint(KEYS))


def test_what_was_held_back_for_a_stop_string_is_said_before_an_error() -> None:
    w = world(depth=1)
    long = grammar("start: /[a-f]{20}/")
    held = constrained([5, 6, 7], 3, Constraint(long))
    text = "".join(Letters().token_text(t) for t in held)
    w.add("bad", [5, 6, 7], grammar=long, max_tokens=20, stop=text + "z")
    while w.said.get("bad.0") != held:
        w.step()
    assert w.answer("bad").outputs[0].text == ""
    w.engine._constraints[0].accept(60)
    w.run()
    out = w.answer("bad").outputs[0]
    assert (out.text, out.token_ids, out.finish_reason) == (text, tuple(held), "error")


def test_thinking_that_has_no_end_is_no_thinking() -> None:
    w = world(depth=1)
    with pytest.raises(ValueError, match="thinking_token_budget"):
        w.add("a", [1], thinking_token_budget=0, thinking_end="")
    w.add("b", [5, 6, 7], grammar=KEYS, thinking_end="", max_tokens=20)
    w.run()
    assert w.said["b.0"] == constrained([5, 6, 7], 20, Constraint(KEYS))


def test_whoever_may_say_anything_again_holds_nobody_up() -> None:
    w = world(depth=2)
    w.add("a", [5, 6, 7], max_tokens=20, thinking_token_budget=2, thinking_end="<=>", ignore_eos=True)
    while "<=>" not in "".join(Letters().token_text(t) for t in w.said.get("a.0", ())):
        w.step()
    assert not w.engine._constraints
    w.step()
    w.run()
    text = [5, 6, 7, *continuation([5, 6, 7], 2), *(ord(c) - ord("0") for c in "<=>")]
    assert w.said["a.0"] == text[3:] + continuation(text, 15)


def test_a_step_takes_in_so_many_certain_tokens_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a long text that is certain; the next steps go on with it."""
    monkeypatch.setattr(engine, "MOST_CERTAIN", 4)
    g = grammar('start: "abcdefghijklmno"')
    w = world(depth=2)
    wanted: dict[str, list[int]] = {}
    for i in range(3):
        w.add(str(i), prompt_of(i), grammar=g, max_tokens=16)
        wanted[f"{i}.0"] = constrained(prompt_of(i), 16, Constraint(g))
    before = 0
    while w.engine.busy:
        w.step()
        counts = w.engine.scheduler.counts
        assert counts.generation_tokens - before <= 4 + 2 * 3
        before = counts.generation_tokens
        w.check()
    assert w.said == wanted
    assert before == 3 * 16, "certain tokens count like others"


def test_an_answer_that_cannot_begin_ends_with_an_error_and_is_told_with_its_time() -> None:
    told = Told()
    w = world(observers=[told])
    w.add("bad", [5, 6, 7], grammar=FREE, max_tokens=20)
    w.engine._constraints[0].accept(60)
    w.run()
    assert w.reasons == {"bad.0": "error"}
    assert told.ended[0].finished > 0
    assert told.ended[0].output_tokens == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nothing_is_sampled_for_who_ends_or_jumps_while_a_step_computes(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """A stop string is found when the steps before are read: the step at work holds a chunk of the sequence already."""
    sampled: list[int] = []
    sample = FakeExecutor.sample

    def noted(self: FakeExecutor, row: Row, mask: np.ndarray | None) -> int:
        sampled.append(sample(self, row, mask))
        return sampled[-1]

    monkeypatch.setattr(FakeExecutor, "sample", noted)
    letters = [Letters().token_text(t) for t in continuation([5, 6, 8], 6)]
    w = world(depth=depth)
    w.add("free", [5, 6, 8], max_tokens=20, ignore_eos=True, stop=letters[5])
    w.add("b", [5, 6, 7], grammar=KEYS, max_tokens=20)
    w.run()
    assert w.reasons["free.0"] == "stop"
    assert w.said["b.0"] == (wanted := constrained([5, 6, 7], 20, Constraint(KEYS)))
    assert len(sampled) == 6 + len(wanted) - len("abcdeflmno3"), "the first digits might go on where k stands"


def test_steps_without_constraints_are_never_held_up() -> None:
    """The steps before are read only where a plan holds somebody with a constraint."""
    w = world(depth=2)
    w.add("a", [5, 6, 7], max_tokens=8, ignore_eos=True)
    assert w.step() == [], "the first step is in flight"
    w.step()
    assert len(w.engine._flying) == 1
    w.add("b", [5, 6, 9], grammar=FREE, max_tokens=3)
    w.run()
