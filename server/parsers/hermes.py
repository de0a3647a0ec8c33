"""The format of Qwen 2.5 and 3, Hermes and many others: a JSON object between tags, one for each call.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from server.parsers.engine import Found, Markers, Steps, Tape, nowhere
from server.parsers.grammar import Grammar
from server.parsers.json_calls import read_calls
from server.parsers.tools import Demand, ToolFormat, Tools

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_OPENINGS = Markers(_OPEN)


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    while opening := (yield from tape.until(_OPENINGS, found.content)):
        raw = [opening]
        yield from tape.space(raw.append)
        while (yield from read_calls(tape, found, tools, opening="".join(raw))):
            yield from tape.space(nowhere)
            if not (yield from tape.see("{", "[")):
                yield from tape.accept(_CLOSE)
                break
            raw.clear()


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    return grammar.marked(_OPEN, f'"\\n" {grammar.object_calls()} "\\n" {grammar.mark(_CLOSE)}')


HERMES = ToolFormat("hermes", (_OPEN, _CLOSE), _read, _write)
