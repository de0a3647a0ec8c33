"""The format of models whose template knows no tools: the answer is one call as a JSON object, or an array of calls.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

A fence around it is accepted. Any other answer is content, also one that is some other JSON.
"""

from __future__ import annotations

from server.parsers.engine import Found, Steps, Tape
from server.parsers.grammar import MOST_CALLS, Grammar, any_of
from server.parsers.json_calls import read_calls
from server.parsers.tools import Demand, ToolFormat, Tools

_SPACE = r"[ \t\r\n]*"
_CALL = rf'{_SPACE}(```(json)?{_SPACE})?(\[{_SPACE})?\{{{_SPACE}"(name|function|arguments|parameters|type|id)"(?s:.*)'
"""What an answer that is no call does not begin with."""
_MARGIN = r"[ \t\r\n]{0,4}"
_FENCE = _MARGIN + r"```(json)?\n"


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    yield from tape.space(found.content)
    opening: list[str] = [(yield from tape.accept("```json", "```"))]
    fenced = bool(opening[0])
    yield from tape.space(opening.append)
    if not (yield from tape.see("{", "[")):
        found.content("".join(opening))
    elif (yield from read_calls(tape, found, tools, opening="".join(opening), bare=True)) and fenced:
        yield from tape.space(found.content)
        yield from tape.accept("```")


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    if demand.required:
        return grammar.only(_calls(grammar, ""))
    fenced = f'{_calls(grammar, _FENCE)} "\\n```"'
    return grammar.text(any_of([_calls(grammar, _MARGIN), fenced, grammar.free(_CALL)]))


def _calls(grammar: Grammar, after: str) -> str:
    one = grammar.object_calls(after=after)
    if not grammar.demand.parallel:
        return one
    more = grammar.object_calls()
    first = grammar.object_calls(after=after + r"\[")
    return any_of([one, f'{first} (", " {more}){{0,{MOST_CALLS - 1}}} "]"'])


JSON = ToolFormat("json", (), _read, _write)
