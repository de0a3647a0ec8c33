"""Constraints in the engine, over the device that can be computed by hand: the right text, however it is computed."""

from __future__ import annotations

import pytest

from jaxserve.grammar.constraint import Constraint
from jaxserve.types import Request, SamplingParams
from tests.fake_executor import Letters, continuation
from tests.grammar.vocabulary import EOS, constrained, grammar
from tests.worlds import world

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


def test_steps_without_constraints_are_never_held_up() -> None:
    """The steps before are read only where a plan holds somebody with a constraint."""
    w = world(depth=2)
    w.add("a", [5, 6, 7], max_tokens=8, ignore_eos=True)
    assert w.step() == [], "the first step is in flight"
    w.step()
    assert len(w.engine._flying) == 1
    w.add("b", [5, 6, 9], grammar=FREE, max_tokens=3)
    w.run()
