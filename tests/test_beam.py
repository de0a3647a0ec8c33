"""Beam search without an engine: on a model of a few tokens whose every answer can be listed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from jaxserve.beam import Beam, BeamSearch, ask, check_width
from jaxserve.types import BeamSearchParams, InvalidRequest, Logprob, TokenLogprobs

VOCAB, END, PROMPT = 4, 3, (0, 1)


def distribution(text: tuple[int, ...], seed: int) -> list[float]:
    """Log probabilities of the next token, a function of the text."""
    draw = random.Random(hash((seed, *text)))
    weights = [draw.random() ** 2 + 0.01 for _ in range(VOCAB)]
    return [math.log(w / sum(weights)) for w in weights]


def answer(text: tuple[int, ...], seed: int) -> TokenLogprobs:
    return {token: Logprob(value) for token, value in enumerate(distribution(text, seed))}


def search(params: BeamSearchParams, *, seed: int = 0, room: int = 100) -> tuple[list[Beam], int]:
    """The best beams and the number of rounds."""
    found = BeamSearch(PROMPT, params, (END,), room)
    rounds = 0
    while texts := found.texts():
        assert len(set(texts)) == len(texts) <= params.beam_width
        found.advance([answer(text, seed) for text in texts])
        rounds += 1
    return found.beams(), rounds


def every_answer(most: int, seed: int, ends: bool = True) -> Iterator[tuple[tuple[int, ...], float]]:
    """All answers that end, or reach `most` tokens, with their log probabilities."""
    for length in range(1, most + 1):
        for tokens in itertools.product(range(VOCAB), repeat=length):
            early = ends and END in tokens[:-1]
            whole = length == most or (ends and tokens[-1] == END)
            if whole and not early:
                texts = [PROMPT + tokens[:i] for i in range(length)]
                yield tokens, sum(distribution(text, seed)[t] for text, t in zip(texts, tokens, strict=True))


def normalised(tokens: tuple[int, ...], logprob: float, penalty: float) -> float:
    return logprob / max(len(tokens) - (tokens[-1] == END), 1) ** penalty


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("seed", range(4))
def test_a_wide_search_finds_what_listing_all_answers_finds(penalty: float, seed: int) -> None:
    """As wide as there are texts of four tokens, nothing is lost on the way, and stopping early changes nothing."""
    params = BeamSearchParams(beam_width=3**4, max_tokens=4, length_penalty=penalty)
    wanted = sorted(((normalised(*one, penalty), one[0]) for one in every_answer(4, seed)), reverse=True)
    found, _ = search(params, seed=seed)
    assert [beam.tokens for beam in found[:10]] == [tokens for _, tokens in wanted[:10]]
    assert [beam.score(penalty) for beam in found[:10]] == pytest.approx([score for score, _ in wanted[:10]])


@pytest.mark.parametrize(("penalty", "goes_on"), [(1.0, True), (0.0, False), (-1.0, False)])
def test_a_search_goes_on_while_a_live_beam_could_still_win(penalty: float, goes_on: bool) -> None:
    """A longer answer may win where length counts for it, even if the live beam is behind now."""
    found = BeamSearch(PROMPT, BeamSearchParams(beam_width=1, max_tokens=10, length_penalty=penalty), (END,), 100)
    found.advance([{END: Logprob(-1.5), 1: Logprob(-2.0)}])
    assert bool(found.texts()) == goes_on


@pytest.mark.parametrize("seed", range(4))
def test_one_beam_that_never_ends_is_greedy(seed: int) -> None:
    [beam], rounds = search(BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True), seed=seed)
    text = PROMPT
    for _ in range(6):
        scores = distribution(text, seed)
        text += (scores.index(max(scores)),)
    assert (PROMPT + beam.tokens, rounds, beam.finish_reason) == (text, 6, "length")


def test_ends_are_marked_unless_they_are_ignored() -> None:
    ended = search(BeamSearchParams(beam_width=3, max_tokens=5, length_penalty=0.0))[0]
    assert {beam.finish_reason for beam in ended} >= {"stop"}
    assert all(beam.ended == (beam.tokens[-1] == END) and END not in beam.tokens[:-1] for beam in ended)
    endless = search(BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True))[0]
    assert {(len(beam.tokens), beam.finish_reason) for beam in endless} == {(5, "length")}


def test_a_search_stops_when_no_beam_can_get_better() -> None:
    """Unnormalised log probabilities only fall, so shorter answers that ended cannot be overtaken."""
    _, rounds = search(BeamSearchParams(beam_width=2, max_tokens=50, length_penalty=0.0), seed=1)
    assert rounds < 20
    assert search(BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True), seed=1)[1] == 50


def test_the_context_limits_the_answers() -> None:
    found, rounds = search(BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True), room=3)
    assert rounds == 3 and {len(beam.tokens) for beam in found} == {3}


def test_each_token_keeps_its_alternatives_itself_first() -> None:
    [beam, *_], _ = search(BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
    assert [next(iter(found)) for found in beam.logprobs] == list(beam.tokens)
    assert all(len(found) == VOCAB for found in beam.logprobs)
    chosen = [found[token].logprob for token, found in zip(beam.tokens, beam.logprobs, strict=True)]
    assert sum(chosen) == pytest.approx(beam.cum_logprob)


def test_impossible_tokens_are_never_taken() -> None:
    found = BeamSearch(PROMPT, BeamSearchParams(beam_width=2, max_tokens=2), (END,), 9)
    found.advance([{0: Logprob(0.0), 1: Logprob(-math.inf)}])
    assert found.texts() == [(*PROMPT, 0)]


def test_a_round_asks_for_twice_the_width_and_more_if_more_is_shown() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=9)
    assert [ask(params, shown).logprobs for shown in (0, 5, 8, -1)] == [6, 6, 8, -1]
    assert ask(params).greedy and ask(params).max_tokens == 1


def test_a_search_wider_than_the_engine_computes_is_refused() -> None:
    params = BeamSearchParams(beam_width=11, max_tokens=1)
    check_width(params, 22)
    check_width(params, -1)
    with pytest.raises(InvalidRequest, match=r"beam_width must be at most 10 .* --max-logprobs 20, got 11"):
        check_width(params, 20)


@pytest.mark.parametrize(
    "wrong",
    [
        {"beam_width": 0},
        {"beam_width": 129},
        {"beam_width": True},
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"temperature": 0.7},
        {"temperature": math.nan},
        {"length_penalty": 11},
        {"length_penalty": math.inf},
        {"ignore_eos": "no"},
    ],
    ids=str,
)
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **wrong})  # type: ignore[arg-type]
