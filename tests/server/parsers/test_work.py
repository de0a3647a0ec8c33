"""The work a machine does grows with the text, not with its square, and nesting costs no stack."""

# ruff: noqa: RUF001

import sys
from types import CodeType

import pytest

from server.parsers.engine import TextMachine
from tests.server.parsers.reading import machine_of, told
from tests.server.parsers.reading import run as run_whole

CALLS = {
    "hermes": [
        '<tool_call>{"name": "now", "arguments": {"a": "',
        '<tool_call>{"arguments": {"a": "',
        "<tool_call>",
        "<",
        '<tool_call>{"',
    ],
    "llama3_json": ['{"name": "now", "parameters": {"a": "', '{"name": "', "a"],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS]now[ARGS]{"a": "', "[TOOL_CALLS][", "["],
    "pythonic": ["[now(a='", "[now(a=", "[now(", "["],
    "qwen3_coder": ["<function=get_weather><parameter=city>", "<function=get_weather><parameter=days>", "<function="],
    "deepseek_v3": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<"],
    "openai": ["<|channel|>", "<|channel|>analysis<|message|>", "<"],
    "json": ['{"name": "now", "arguments": {"a": "', "```json", "["],
}
FILLERS = ["a", " ", "<", "\\\\", "1", "["]
CASES = [(name, start, filler) for name, starts in CALLS.items() for start in starts for filler in FILLERS]
_TOOL = sys.monitoring.DEBUGGER_ID


def _work(name: str, start: str, text: str) -> int:
    """Function calls and resumptions inside, and characters that waited, while the text comes in single characters."""
    count = 0

    def called(code: CodeType, offset: int) -> None:
        nonlocal count
        count += 1

    machine = machine_of(name)
    assert isinstance(machine, TextMachine)
    machine.feed(start)
    sys.monitoring.use_tool_id(_TOOL, "work")
    events = sys.monitoring.events
    sys.monitoring.register_callback(_TOOL, events.PY_START, called)
    sys.monitoring.register_callback(_TOOL, events.PY_RESUME, called)
    sys.monitoring.set_events(_TOOL, events.PY_START | events.PY_RESUME)
    try:
        for char in text:
            machine.feed(char)
            count += machine.held
    finally:
        sys.monitoring.set_events(_TOOL, 0)
        sys.monitoring.free_tool_id(_TOOL)
    return count


@pytest.mark.parametrize(("name", "start", "filler"), CASES)
def test_work_is_linear(name: str, start: str, filler: str):
    """Every character of a text that never ends what it began costs the same bounded work."""
    size = 600
    text = (filler * size)[:size]
    assert _work(name, start, text) <= 80 * size


@pytest.mark.slow
def test_a_megabyte_in_single_characters():
    """A string that nothing closes comes out as it comes in, piece by piece."""
    made = machine_of("hermes")
    made.feed('<tool_call>{"name": "now", "arguments": {"a": "')
    assert sum(len(made.feed("x")) for _ in range(1_000_000)) == 1_000_000
    assert made.end() == []


@pytest.mark.parametrize(
    ("name", "text", "rest"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": ', "}}</tool_call>"),
        ("llama3_json", '{"name": "now", "parameters": {"a": ', "}}"),
        ("mistral", '[TOOL_CALLS]now[ARGS]{"a": ', "}"),
        ("pythonic", "[now(a=", ")]"),
        ("qwen3_coder", "<function=get_weather><parameter=spots>", "</parameter></function>"),
        ("deepseek_v3", '<｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": ', "}"),
        ("openai", '<|channel|>commentary to=functions.now<|message|>{"a": ', "}"),
        ("json", '{"name": "now", "arguments": {"a": ', "}}"),
        ("json", "", ""),
    ],
)
def test_nesting_costs_no_stack(name: str, text: str, rest: str):
    """A hundred thousand brackets are read like three."""
    depth = 100_000
    deep = told(run_whole(machine_of(name), [text + "[" * depth + "]" * depth + rest]))
    few = told(run_whole(machine_of(name), [text + "[" * 3 + "]" * 3 + rest]))
    assert deep.replace("[" * depth, "[" * 3).replace("]" * depth, "]" * 3) == few
