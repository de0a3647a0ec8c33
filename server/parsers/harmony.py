"""The format of gpt-oss: an answer is a series of messages on channels, and both halves share it.

    <|channel|>analysis<|message|>The user asks...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}

`analysis` is reasoning, a message to a function is a call, `final` and `commentary` to nobody are content. What stands
in a header is never content. Two messages of a kind are a paragraph apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from server.parsers.engine import Found, Markers, Reader, Sink, Steps, Tape, nowhere
from server.parsers.grammar import Grammar, any_of, escaped, quoted
from server.parsers.json_text import read_value
from server.parsers.reasoning import ReasoningFormat
from server.parsers.tools import Demand, Tool, ToolFormat, Tools

_START = "<|start|>"
_CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
_CONSTRAIN = "<|constrain|>"
_END = "<|end|>"
_CALL = "<|call|>"
_RETURN = "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_SPECIALS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_MARKS = Markers(*_SPECIALS)
_THOUGHT = f"{_CHANNEL}analysis{_MESSAGE}"
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis")
_PARAGRAPH = "\n\n"


def harmony(*, opened: bool, calls: bool) -> Reader:
    """Reads an answer. `opened`: it begins inside a thought. `calls`: False reads messages to functions as content."""
    return lambda tape, found: _read(tape, found, opened, calls)


def _read(tape: Tape, found: Found, opened: bool, calls: bool) -> Steps[None]:
    header: list[str] = []
    sink: Sink = found.reasoning if opened else found.content
    if (yield from tape.see(" to=")):
        sink = header.append
    while mark := (yield from tape.until(_MARKS, sink)):
        if mark in (_START, _CHANNEL):
            header.append(mark)
            sink = header.append
        elif mark == _MESSAGE:
            text = "".join(header)
            header.clear()
            found.turn(_PARAGRAPH)
            sink = found.reasoning if _ANALYSIS.search(text) else found.content
            recipient = _RECIPIENT.search(text)
            if recipient and calls:
                sink = found.content
                yield from _read_call(tape, found, recipient[1])
        elif mark in _ENDS:
            sink = found.content
        else:
            sink(" ")


def _read_call(tape: Tape, found: Found, name: str) -> Steps[None]:
    yield from tape.space(nowhere)
    if (yield from tape.see("{")):
        found.start(name)
        if (yield from read_value(tape, found.arguments)):
            found.end()
    elif (yield from tape.see(*_ENDS)):
        found.start(name)
        found.arguments("{}")
        found.end()


def _read_all(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    return _read(tape, found, False, True)


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    mark = grammar.mark
    again = grammar.rule(f'{mark(_START)} "assistant"')
    call = grammar.rule(
        f'{mark(_CHANNEL)} "commentary to=functions." '
        + any_of([f"{quoted(tool.name)} {grammar.rule(_body(grammar, tool))}" for tool in demand.tools])
    )
    calls = f"{grammar.several(call, f'{mark(_CALL)} {again}')} {mark(_CALL)}?"
    aside = any_of(['"analysis"'] if demand.required else ['"analysis"', '"commentary"'])
    asides = f"({mark(_CHANNEL)} {aside} {mark(_MESSAGE)} {grammar.until(_END)} {again})*"
    if demand.required:
        return grammar.text(f"{again}? {asides} {calls}")
    marks = "|".join(escaped(special) for special in _SPECIALS)
    last = f'{mark(_CHANNEL)} "final" {mark(_MESSAGE)} {grammar.free(f"(?s:.*)({marks})(?s:.*)")}'
    return grammar.text(f"{again}? {asides} {any_of([calls, last])}")


def _body(grammar: Grammar, tool: Tool) -> str:
    kind = f'(" " {grammar.mark(_CONSTRAIN)} "json")?'
    return f"{kind} {grammar.mark(_MESSAGE)} {grammar.arguments(tool)}"


def _ends_with(*markers: str) -> Callable[[str], bool]:
    return lambda prompt: prompt.rstrip().endswith(markers)


OPENAI = ToolFormat("openai", _SPECIALS, _read_all, _write)
OPENAI_GPTOSS = ReasoningFormat(
    "openai_gptoss",
    _THOUGHT,
    _END,
    _SPECIALS,
    opened=_ends_with(_THOUGHT),
    thinks=_ends_with(_THOUGHT, f"{_START}assistant"),
    reader=lambda opened: harmony(opened=opened, calls=False),
)
