"""The format of Llama 3 and 4: JSON objects with a name and parameters, separated by semicolons.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}

They begin the answer, or follow `<|python_tag|>` (Llama 4: `<|python_start|>`) anywhere in it. An answer that begins
with some other JSON is content.
"""

from __future__ import annotations

from server.parsers.engine import Found, Markers, Steps, Tape
from server.parsers.grammar import MOST_CALLS, Grammar, any_of
from server.parsers.json_calls import read_calls
from server.parsers.tools import Demand, ToolFormat, Tools

_TAG = "<|python_tag|>"
_START = "<|python_start|>"
_END = "<|python_end|>"
_TAGS = Markers(_TAG, _START)
_CALL = r'[ \t\r\n]*(\[[ \t\r\n]*)?\{[ \t\r\n]*"(name|function|arguments|parameters|type|id)"(?s:.*)'
"""What an answer that is no call does not begin with."""
_BETWEEN = '"; "'
_MARGIN = r"[ \t\r\n]{0,4}"


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    opening = ""
    while True:
        raw = [opening]
        yield from tape.space(raw.append)
        if not (yield from tape.see("{", "[")):
            found.content("".join(raw))
        elif (yield from read_calls(tape, found, tools, opening="".join(raw), bare=True)):
            yield from tape.space(found.content)
            yield from tape.accept(_END)
            yield from tape.space(found.content)
            opening = yield from tape.accept(";", _TAG, _START)
            if opening or (yield from tape.see("{", "[")):
                continue
        opening = yield from tape.until(_TAGS, found.content)
        if not opening:
            return


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    tag = grammar.mark(_TAG)
    more = grammar.object_calls("parameters")
    if demand.required:
        return grammar.only(f"{tag}? {grammar.several(more, _BETWEEN)}")
    first = grammar.object_calls("parameters", after=_MARGIN)
    rest = f"({_BETWEEN} {more}){{0,{MOST_CALLS - 1}}}" if demand.parallel else ""
    free = grammar.free_of(_TAG, _CALL)
    return grammar.text(any_of([f"{first} {rest}", f"{grammar.until(_TAG, _CALL)} {more} {rest}", free]))


LLAMA3_JSON = ToolFormat("llama3_json", (_TAG, _START, _END), _read, _write)
