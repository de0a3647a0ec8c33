"""From tokens to text: stop strings over token borders, text that is held back, and an oracle in plain Python."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.host.text import TextStream


class Pieces:
    """Token t is the t-th piece of UTF-8; a piece may end inside a character."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str | None:
        return self._decoder.decode(self._pieces[token]) or None

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def run(
    pieces: Sequence[bytes | str], stops: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
) -> tuple[list[str], str | None]:
    """What leaves at each token and at the end, and the stop string."""
    encoded = [p.encode() if isinstance(p, str) else p for p in pieces]
    stream = TextStream(Pieces(encoded), stops, include_stop=include_stop, min_tokens=min_tokens)
    out: list[str] = []
    for token in range(len(encoded)):
        piece = stream.push(token)
        out.append(piece.text)
        if piece.stop is not None:
            return out, piece.stop
    last = stream.flush()
    return [*out, last.text], last.stop


def oracle(
    pieces: Sequence[bytes], stops: Sequence[str], *, include_stop: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The text up to the stop string that begins first, once one ends in a token from the `min_tokens`-th on."""
    stream, text = Pieces(pieces), ""
    for i in range(len(pieces) + 1):
        before = len(text)
        text += stream.flush() if i == len(pieces) else stream.step(i) or ""
        if (i + 1 < min_tokens and i < len(pieces)) or len(pieces) < min_tokens:
            continue
        ends = [
            (at, stop)
            for stop in stops
            for at in range(len(text) - len(stop) + 1)
            if text.startswith(stop, at) and at + len(stop) > before
        ]
        if ends:
            at, stop = min(ends)
            return text[: at + len(stop) * include_stop], stop
    return text, None


@pytest.mark.parametrize(
    ("pieces", "stops", "out", "stop"),
    [
        (["ab", "cd"], [], ["ab", "cd", ""], None),
        (["ab", "cd"], ["bc"], ["a", ""], "bc"),
        (["a", "b", "c", "d"], ["bcd"], ["a", "", "", ""], "bcd"),
        (["a", "b", "c", "x"], ["bcd"], ["a", "", "", "bcx", ""], None),
        (["a", "b", "c"], ["bcd"], ["a", "", "", "bc"], None),
        (["aa", "ab"], ["aab"], ["", "a"], "aab"),
        (["aaa", "b"], ["aab"], ["a", ""], "aab"),
        (["xSTOPy"], ["STOP", "OP"], ["x"], "STOP"),
        (["xSTOPy"], ["OP", "STOP"], ["x"], "STOP"),
        (["ab", "c"], ["abc", "b"], ["a"], "b"),
        (["n\n", "\n"], ["\n\n"], ["n", ""], "\n\n"),
        ([b"\xc3", b"\xa9!"], ["é"], ["", ""], "é"),
        ([b"a\xf0\x9f", b"\x99\x82"], [], ["a", "🙂", ""], None),
        ([b"a\xf0\x9f"], ["�"], ["a", ""], "�"),
        ([b"a\xc3"], [], ["a", "�"], None),
    ],
)
def test_what_leaves_and_when(pieces: list[bytes | str], stops: list[str], out: list[str], stop: str | None) -> None:
    assert run(pieces, stops) == (out, stop)


def test_the_stop_string_is_shown_when_asked_and_nothing_behind_it() -> None:
    assert run(["ab", "cdef"], ["bcd"], include_stop=True) == (["a", "bcd"], "bcd")


def test_a_stop_string_counts_from_the_token_that_reaches_min_tokens_on() -> None:
    assert run(["a", "x", "b", "x"], ["x"], min_tokens=2) == (["a", ""], "x")
    assert run(["a", "x", "b", "x"], ["x"], min_tokens=3) == (["a", "x", "b", ""], "x")
    assert run(["x", "y", "z"], ["xy"], min_tokens=2) == (["", ""], "xy")
    assert run(["x", "y", "z"], ["xy"], min_tokens=3) == (["", "xy", "z", ""], None)


def test_a_token_without_text_counts_for_min_tokens() -> None:
    stream = TextStream(Pieces([b"a", b"x"]), ["x"], include_stop=False, min_tokens=2)
    stream.skip()
    assert stream.push(1).stop == "x"


texts = st.text(alphabet="abé🙂", max_size=14)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(
    text=texts,
    cut=st.integers(0, 3),
    splits=st.lists(st.integers(0, 40), max_size=8),
    stops=st.lists(st.text(alphabet="abé🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_joined_output_equals_the_oracle(
    text: str, cut: int, splits: list[int], stops: list[str], include_stop: bool, min_tokens: int
) -> None:
    data = text.encode()
    data = data[: len(data) - cut]
    edges = [0, *sorted(min(s, len(data)) for s in splits), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    out, stop = run(pieces, stops, include_stop=include_stop, min_tokens=min_tokens)
    want, wanted_stop = oracle(pieces, stops, include_stop=include_stop, min_tokens=min_tokens)
    assert ("".join(out), stop) == (want, wanted_stop)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(text=texts, more=texts, stops=st.lists(texts.filter(bool), min_size=1, max_size=3))
def test_nothing_leaves_that_a_later_stop_string_would_cut(text: str, more: str, stops: list[str]) -> None:
    """And no more is held back than that."""
    stream = TextStream(Pieces([text.encode(), more.encode()]), stops, include_stop=False, min_tokens=0)
    first = stream.push(0)
    if first.stop is not None:
        return
    held = text[len(first.text) :]
    assert text == first.text + held
    assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    for stop in stops:
        for at in range(len(first.text)):
            assert not stop.startswith(text[at:]), "what has left could still become a stop string"
