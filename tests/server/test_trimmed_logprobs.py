"""An echo's logprobs and prompt_logprobs are computed together, and each shows as many as it asked for."""

from __future__ import annotations

from jaxserve.types import Logprob
from server.openai.logprobs import trimmed

FOUND = {7: Logprob(-9.0, 30), 1: Logprob(-0.1, 1), 2: Logprob(-2.0, 2), 3: Logprob(-3.0, 3)}


def test_each_keeps_the_token_and_its_own_number() -> None:
    assert [list(entry or ()) for entry in trimmed([None, FOUND], 1)] == [[], [7, 1]]
    assert list(trimmed([FOUND], 0)[0] or ()) == [7]
    assert trimmed([FOUND], -1) == [FOUND]


def test_a_likely_token_is_not_counted_twice() -> None:
    likely = {1: Logprob(-0.1, 1), 2: Logprob(-2.0, 2), 3: Logprob(-3.0, 3)}
    assert list(trimmed([likely], 2)[0] or ()) == [1, 2]
