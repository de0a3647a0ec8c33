"""The format of DeepSeek V3 and R1, and the shorter one of V3.1.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜>
    <｜tool▁call▁begin｜>...<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.1 writes `<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>`. Both are read.
"""

from __future__ import annotations

from server.parsers.engine import Found, Markers, Steps, Tape, nowhere
from server.parsers.grammar import Grammar, any_of, quoted
from server.parsers.json_text import read_value
from server.parsers.tools import Demand, ToolFormat, Tools


def _special(words: str) -> str:
    return f"<\uff5c{words}\uff5c>"


_ALL = _special("tool▁calls▁begin")
_ALL_END = _special("tool▁calls▁end")
_CALL = _special("tool▁call▁begin")
_CALL_END = _special("tool▁call▁end")
_MIDDLE = _special("tool▁sep")
_SPECIALS = (_ALL, _ALL_END, _CALL, _CALL_END, _MIDDLE)
_FENCE = "```json\n"
_FENCE_END = "\n```"

_OPENINGS = Markers(_ALL, _CALL)
_MIDDLES = Markers(_MIDDLE, _CALL_END, _ALL_END, _CALL)
_NAME_ENDS = Markers("\n", *_SPECIALS)


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    while opening := (yield from tape.until(_OPENINGS, found.content)):
        raw = [opening]
        if opening == _ALL:
            yield from tape.space(raw.append)
            raw.append((yield from tape.accept(_CALL)))
        if raw[-1] != _CALL:
            found.content("".join(raw))
        elif (yield from _read_call(tape, found, raw)):
            yield from tape.space(nowhere)
            yield from tape.accept(_CALL_END)
            yield from tape.space(nowhere)
            yield from tape.accept(_ALL_END)


def _read_call(tape: Tape, found: Found, raw: list[str]) -> Steps[bool]:
    name = yield from _read_name(tape, raw)
    if not name:
        found.content("".join(raw))
        return False
    found.start(name)
    yield from tape.space(nowhere)
    yield from tape.accept("```json", "```")
    yield from tape.space(nowhere)
    if (yield from tape.see("{")):
        if not (yield from read_value(tape, found.arguments)):
            return False
    elif (yield from tape.see("```", _CALL_END, _ALL_END, _CALL)):
        found.arguments("{}")
    else:
        return False
    found.end()
    yield from tape.space(nowhere)
    yield from tape.accept("```")
    return True


def _read_name(tape: Tape, raw: list[str]) -> Steps[str]:
    """The name, or "" where there is none. What was read is in `raw`."""
    first: list[str] = []
    end = yield from tape.until(_MIDDLES, first.append)
    raw += [*first, end]
    if end != _MIDDLE:
        return ""
    yield from tape.space(raw.append)
    if (yield from tape.see("{")):
        return "".join(first).strip()
    second: list[str] = []
    end = yield from tape.until(_NAME_ENDS, second.append)
    raw += [*second, end]
    return "".join(second).strip() if end == "\n" else ""


def _write_v3(demand: Demand) -> str:
    grammar = Grammar(demand)
    head = f'{grammar.mark(_CALL)} "function" {grammar.mark(_MIDDLE)}'
    calls = [
        f"{head} {quoted(f'{tool.name}\n{_FENCE}')} {grammar.arguments(tool)} {quoted(_FENCE_END)}"
        for tool in demand.tools
    ]
    return _block(grammar, calls, quoted("\n"))


def _write_v31(demand: Demand) -> str:
    grammar = Grammar(demand)
    calls = [
        f"{grammar.mark(_CALL)} {quoted(tool.name)} {grammar.mark(_MIDDLE)} {grammar.arguments(tool)}"
        for tool in demand.tools
    ]
    return _block(grammar, calls, quoted(""))


def _block(grammar: Grammar, calls: list[str], between: str) -> str:
    """All calls are in one block."""
    call = grammar.rule(f"{any_of(calls)} {grammar.mark(_CALL_END)}")
    block = f"{grammar.several(call, between)} {grammar.mark(_ALL_END)}"
    if grammar.demand.required:
        return grammar.only(f"{grammar.mark(_ALL)} {block}")
    return grammar.text(f"({grammar.until(_ALL)} {block})? {grammar.free_of(_ALL)}")


DEEPSEEK_V3 = ToolFormat("deepseek_v3", _SPECIALS, _read, _write_v3)
DEEPSEEK_V31 = ToolFormat("deepseek_v31", _SPECIALS, _read, _write_v31)
