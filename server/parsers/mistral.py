"""The format of Mistral's models, in its older and its newer form; the grammar lets the model take the one it knows.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}
"""

from __future__ import annotations

import re

from server.parsers.engine import Found, Markers, Steps, Tape
from server.parsers.grammar import Grammar, any_of, quoted
from server.parsers.json_calls import read_calls
from server.parsers.json_text import read_value
from server.parsers.tools import Demand, ToolFormat, Tools

_CALLS = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGUMENTS = "[ARGS]"
_OPENINGS = Markers(_CALLS)
_NAME = re.compile(r"[\w.-]*")


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    while opening := (yield from tape.until(_OPENINGS, found.content)):
        raw = [opening]
        yield from tape.space(raw.append)
        if (yield from tape.see("[{", "[ ", "[\n", "[]", "{")):
            yield from read_calls(tape, found, tools, opening="".join(raw))
        else:
            yield from _read_call(tape, found, raw)


def _read_call(tape: Tape, found: Found, raw: list[str]) -> Steps[None]:
    name = yield from _read_word(tape, raw)
    id = ""
    if (yield from tape.see(_ID)):
        raw.append(tape.take(len(_ID)))
        id = yield from _read_word(tape, raw)
    marked = yield from tape.accept(_ARGUMENTS)
    raw.append(marked)
    if not marked:
        yield from tape.space(raw.append)
    if not name or not (marked or (yield from tape.see("{"))):
        found.content("".join(raw))
        return
    found.start(name, id or None)
    yield from tape.space(found.content)
    if (yield from tape.see("{")):
        if (yield from read_value(tape, found.arguments)):
            found.end()
    elif (yield from tape.peek()):
        found.arguments("{}")
        found.end()


def _read_word(tape: Tape, raw: list[str]) -> Steps[str]:
    start = len(raw)
    yield from tape.run(_NAME, raw.append)
    return "".join(raw[start:])


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    id = f"({grammar.mark(_ID)} /[0-9A-Za-z]{{1,36}}/)?"
    arguments = grammar.mark(_ARGUMENTS)
    named = any_of([f"{quoted(tool.name)} {id} {arguments} {grammar.arguments(tool)}" for tool in demand.tools])
    item = grammar.object_calls()
    array = f'/ ?\\[/ {grammar.several(item, quoted(", "))} "]"'
    if not demand.required:
        return grammar.marked(_CALLS, any_of([named, array]))
    mark = grammar.mark(_CALLS)
    return grammar.only(any_of([f"{mark} {array}", grammar.several(grammar.rule(f"{mark} {named}"), quoted(""))]))


MISTRAL = ToolFormat("mistral", (_CALLS, _ID, _ARGUMENTS), _read, _write)
