"""What may follow: a grammar step by step, free thinking before it, the end said for a model that thinks too long."""

from __future__ import annotations

import numpy as np

from jaxserve.grammar.constraint import Constraint, Thinking, certain, fill
from tests.fake_executor import Letters
from tests.grammar.vocabulary import EOS, allowed, grammar, masks


def ids(text: str) -> list[int]:
    return [ord(c) - ord("0") for c in text]


def thinking(end: str, budget: int | None = None) -> Thinking:
    return Thinking(end, tuple(ids(end)), Letters().token_bytes, budget)


def test_a_grammar_is_followed_to_its_end_and_then_only_the_end_may_follow() -> None:
    c = Constraint(grammar('start: "ab" | "ac"'))
    assert allowed(c) == ids("a")
    assert c.accept(ids("a")[0])
    assert allowed(c) == ids("bc")
    assert c.accept(ids("c")[0])
    assert allowed(c) == [EOS]
    assert c.accept(EOS)
    assert allowed(c) == [EOS]
    assert c.accept(EOS), "a sequence that ignores the end may say it again"
    assert not c.accept(ids("a")[0])


def test_a_token_that_must_not_follow_is_the_end() -> None:
    c = Constraint(grammar('start: "ab"'))
    assert not c.accept(ids("b")[0])
    assert not c.accept(ids("a")[0])


def test_anything_may_be_thought_and_the_grammar_begins_after_it() -> None:
    c = Constraint(grammar('start: "ab"'), thinking("<>"))
    for token in ids("ab<ab<"):
        assert len(allowed(c)) == 64
        assert c.accept(token)
    assert c.accept(ids(">")[0])
    assert allowed(c) == ids("a")
    assert not c.done


def test_without_a_grammar_a_constraint_ends_with_the_thinking() -> None:
    c = Constraint(None, thinking("<>", budget=10))
    assert not c.done
    for token in ids("a<>"):
        c.accept(token)
    assert c.done


def test_a_spent_budget_says_the_end_of_thinking() -> None:
    c = Constraint(grammar('start: "ab"'), thinking("<;>", budget=2))
    said = []
    for token in ids("aa"):
        assert len(allowed(c)) == 64
        c.accept(token)
    while allowed(c) != ids("a"):
        [token] = allowed(c)
        said.append(token)
        c.accept(token)
    assert said == ids("<;>")


def test_an_end_that_the_model_says_in_many_tokens_is_seen() -> None:
    c = Constraint(grammar('start: "ab"'), thinking("<;=>", budget=100))
    for token in ids("a<;<;="):
        assert c.accept(token)
        assert len(allowed(c)) == 64
    assert c.accept(ids(">")[0])
    assert allowed(c) == ids("a")


def test_an_end_whose_tokens_do_not_spell_it_is_said_once() -> None:
    c = Constraint(grammar('start: "ab"'), Thinking("<end of thinking>", (7, 8), lambda token: b"", 0))
    for token in (7, 8):
        assert allowed(c) == [token]
        assert c.accept(token)
    assert allowed(c) == ids("a")


def test_no_budget_at_all_ends_the_thinking_at_once() -> None:
    c = Constraint(None, thinking("<>", budget=0))
    assert allowed(c) == ids("<")


def test_the_end_of_thinking_may_come_in_the_middle_of_a_token() -> None:
    words = {0: b"abc<", 1: b"> \n", 2: b">a", 3: b">x"}
    for token, ok, follows in ((1, True, ids("a")), (2, True, ids("b")), (3, False, None)):
        c = Constraint(grammar('start: "ab"'), Thinking("<>", (0,), lambda t: words[t]))
        assert c.accept(0)
        assert c.accept(token) == ok
        if follows is not None:
            assert allowed(c) == follows


def test_masks_of_many_rows_at_once_are_those_of_each_alone() -> None:
    g = grammar("start: /[a-f]{1,8}/")
    constraints = [Constraint(g), Constraint(g), Constraint(None, thinking("<>", 0)), Constraint(g, thinking("<>"))]
    constraints[1].accept(ids("a")[0])
    together, alone = masks(4), masks(4)
    fill(list(enumerate(constraints)), together)
    for at, c in enumerate(constraints):
        c.fill(alone, at)
    assert np.array_equal(together, alone)
    assert (together[3] == -1).all()


def test_certain_is_the_only_token_of_a_row() -> None:
    row = masks()
    assert certain(row, 0) is None
    row[:] = 0
    assert certain(row, 0) is None
    for token in (0, 31, 32, 63):
        row[:] = 0
        row.view(np.uint32)[0, token // 32] = 1 << token % 32
        assert certain(row, 0) == token
    row.view(np.uint32)[0, 0] = 3
    assert certain(row, 0) is None


def test_a_grammar_serves_many_sequences() -> None:
    g = grammar('start: "ab"')
    first, second = Constraint(g), Constraint(g)
    first.accept(ids("a")[0])
    assert allowed(second) == ids("a")
