"""Properties of every machine: cuts change nothing, no text is an error, and calls that are written are read."""

# ruff: noqa: RUF001

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.parsers.events import Arguments, CallEnd, CallStart
from server.parsers.registry import REASONING_FORMATS, TOOL_FORMATS
from tests.server.parsers.reading import joined, machine_of, run
from tests.server.parsers.writing import WRITERS, Call

PIECES = [
    "<tool_call>", "</tool_call>", "<function=now>", "<function=get_weather>", "<parameter=city>", "<parameter=days>",
    "</parameter>", "</function>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>",
    "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "<|call|>", "<|constrain|>", "analysis", "final",
    "commentary to=functions.now",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "function", "```json\n", "```", "<think>", "</think>", '{"name": "now"', ', "arguments": ',
    '"parameters"', '{"a": 1}', "get_weather", "now", "(city='x'", "days=", "{", "}", "[", "]", "(", ")", '"', "'",
    "\\", "\\u00e9", ":", ",", "=", ";", " ", "\n", "1", "-2.5e3", "true", "None", "ключ", "\x00", "<", "<t", "[T",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=25).map("".join)
MACHINES = [(name, None) for name in TOOL_FORMATS] + [(None, name) for name in REASONING_FORMATS]
MACHINES += [("hermes", "qwen3"), ("openai", "openai_gptoss"), ("mistral", "deepseek_r1")]


@pytest.mark.parametrize(("tool", "reasoning"), MACHINES)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12), opened=st.booleans())
def test_a_cut_changes_nothing(tool: str | None, reasoning: str | None, text: str, cuts: list[int], opened: bool):
    """The events of any text, joined, are those of the whole; calls are numbered in order, started once, ended once."""
    places = sorted({min(cut, len(text)) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    whole = run(machine_of(tool, reasoning, opened=opened), [text])
    assert run(machine_of(tool, reasoning, opened=opened), pieces) == whole
    assert run(machine_of(tool, reasoning, opened=opened), text) == whole
    starts = [event.index for event in whole if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    ends = [event.index for event in whole if isinstance(event, CallEnd)]
    assert ends == sorted(set(ends)) and set(ends) <= set(starts)
    for index in ends:
        text = "".join(event.text for event in whole if isinstance(event, Arguments) and event.index == index)
        assert isinstance(json.loads(text), dict)


WORDS = st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="<"), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
WEATHER = st.fixed_dictionaries(
    {"city": WORDS},
    optional={
        "days": st.integers(),
        "unit": st.sampled_from(["C", "F"]),
        "spots": st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False)),
        "now": st.booleans(),
    },
)
CALLS = st.lists(
    st.tuples(st.just("get_weather"), WEATHER)
    | st.tuples(st.just("поиск-web_2"), st.fixed_dictionaries({"ключ": WORDS}))
    | st.tuples(st.just("now"), st.just({})),
    min_size=1,
    max_size=4,
)
FREE_CALLS = st.lists(
    st.tuples(st.sampled_from(["anything", "other"]), st.dictionaries(st.sampled_from("abc"), VALUES)),
    min_size=1,
    max_size=3,
)


def _calls(name: str, text: str) -> list[Call]:
    events = joined(run(machine_of(name), [text]))
    assert sum(isinstance(event, CallEnd) for event in events) == sum(isinstance(event, CallStart) for event in events)
    assert all(isinstance(event, CallStart | Arguments | CallEnd) for event in events)
    names = [event.name for event in events if isinstance(event, CallStart)]
    arguments = [json.loads(event.text) for event in events if isinstance(event, Arguments)]
    return list(zip(names, arguments, strict=True))


@pytest.mark.parametrize(("name", "write"), WRITERS)
@settings(max_examples=30, deadline=None)
@given(calls=CALLS)
def test_calls_of_tools_come_back(name: str, write: Callable[[Sequence[Call]], str], calls: list[Call]):
    """Calls with arguments of their schema, written in a format, are read as themselves and as nothing else."""
    assert _calls(name, write(calls)) == calls


@pytest.mark.parametrize(("name", "write"), [item for item in WRITERS if item[0] != "qwen3_coder"])
@settings(max_examples=30, deadline=None)
@given(calls=FREE_CALLS)
def test_any_arguments_come_back(name: str, write: Callable[[Sequence[Call]], str], calls: list[Call]):
    """Arguments of any JSON, where the format itself tells their types."""
    assert _calls(name, write(calls)) == calls
