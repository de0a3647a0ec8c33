"""Deltas put together say what was said, at a cost that grows with what they hold."""

from __future__ import annotations

import time

from jaxserve.deltas import Deltas
from jaxserve.types import CompletionOutput, Logprob, RequestOutput, RequestTimes


def piece(index: int, token: int, reason: str | None = None) -> CompletionOutput:
    scores = ({token: Logprob(-float(token), 1, str(token))},)
    return CompletionOutput(index, str(token), (token,), -1.0 * token, scores, reason)  # type: ignore[arg-type]


def delta(*pieces: CompletionOutput, finished: bool = False, at: float = 0.0, scores: tuple | None = None):
    return RequestOutput("r", None, (1,), pieces, finished, scores, 3, RequestTimes(last_token=at))


def test_choices_are_joined_and_the_latest_tells_the_rest() -> None:
    whole = Deltas(
        delta(piece(1, 5), scores=(None,), at=1.0),
        delta(piece(0, 2)),
        delta(piece(0, 3, "stop"), piece(1, 6, "length"), finished=True, at=2.0),
    ).whole()
    assert whole.finished
    assert whole.prompt_logprobs == (None,)
    assert whole.metrics.last_token == 2.0
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in whole.outputs] == [
        (0, "23", (2, 3), "stop"),
        (1, "56", (5, 6), "length"),
    ]
    assert [next(iter(found)) for found in whole.outputs[1].logprobs or ()] == [5, 6]
    assert whole.outputs[1].cumulative_logprob == -6.0


def test_the_whole_can_be_asked_for_again_after_more() -> None:
    deltas = Deltas(delta(piece(0, 1)))
    assert deltas.whole().outputs[0].text == "1"
    deltas.add(delta(piece(0, 2)))
    assert deltas.whole().outputs[0].text == "12"


def test_ten_times_the_tokens_cost_about_ten_times_the_time() -> None:
    def seconds(count: int) -> float:
        found = [delta(piece(0, token)) for token in range(count)]
        began = time.process_time()
        assert len(Deltas(*found).whole().outputs[0].token_ids) == count
        return time.process_time() - began

    short = min(seconds(2_000) for _ in range(3))
    assert seconds(40_000) < 20 * 5 * short
