"""The format of Llama 3.2's and 4's Python calls, and of models that learned it: a list of calls with keywords.

    [get_weather(city="Paris", days=3), now()]

It is the whole answer, alone or between `<|python_start|>` and `<|python_end|>`. Values are literals, read as JSON.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.parsers.engine import Found, Steps, Tape, nowhere
from server.parsers.grammar import MOST_CALLS, Grammar, any_of, escaped, quoted
from server.parsers.python_text import inside_string, read_literal
from server.parsers.schemas import Member, members_of
from server.parsers.tools import Demand, Tool, ToolFormat, Tools

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME = re.compile(r"[\w.-]*")
_MARGIN = r"[ \t\r\n]{0,4}"
_CALL = r"[ \t\r\n]*(<\|python_start\|>[ \t\r\n]*)?\[[ \t\r\n]*[\w.\-]+[ \t\r\n]*\((?s:.*)"
"""What an answer that is no call does not begin with."""


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    yield from tape.space(found.content)
    raw = [(yield from tape.accept(_START))]
    yield from tape.space(raw.append)
    raw.append((yield from tape.accept("[")))
    if not raw[-1]:
        found.content("".join(raw))
        return
    while True:
        if not (yield from _read_call(tape, found, tools, raw)):
            return
        raw.clear()
        yield from tape.space(raw.append)
        end = yield from tape.accept("]", ",")
        raw.append(end)
        if end == "]":
            break
        if not end:
            found.content("".join(raw))
            return
    yield from tape.space(found.content)
    yield from tape.accept(_END)


@dataclass(slots=True)
class _Call:
    """A call while it is read."""

    found: Found
    name: str
    started: bool = False
    before: str = "{"

    def start(self) -> None:
        if not self.started:
            self.started = True
            self.found.start(self.name)

    def open(self, key: str) -> None:
        """The next argument begins."""
        self.start()
        self.found.arguments(f'{self.before}"{inside_string(key)}": ')
        self.before = ", "

    def finish(self) -> None:
        self.start()
        self.found.arguments("{}" if self.before == "{" else "}")
        self.found.end()


def _read_call(tape: Tape, found: Found, tools: Tools, raw: list[str]) -> Steps[bool]:
    """One call. It has started once its name is known, and is that of a tool or followed by a keyword or nothing."""
    yield from tape.space(raw.append)
    call = _Call(found, (yield from _read_name(tape, raw)))
    bracket = yield from tape.accept("(")
    raw.append(bracket)
    if not call.name or not bracket:
        found.content("".join(raw))
        return False
    if call.name in tools:
        call.start()
        raw.clear()
    yield from tape.space(raw.append)
    while not (yield from tape.accept(")")):
        if not (yield from _read_argument(tape, call, raw)):
            return False
    call.finish()
    return True


def _read_argument(tape: Tape, call: _Call, raw: list[str]) -> Steps[bool]:
    key = yield from _read_keyword(tape, raw)
    if not key:
        call.found.content("".join(raw))
        return False
    raw.clear()
    call.open(key)
    yield from tape.space(nowhere)
    if not (yield from read_literal(tape, call.found.arguments)):
        return False
    yield from tape.space(nowhere)
    if not (yield from tape.accept(",")):
        return bool((yield from tape.see(")")))
    yield from tape.space(nowhere)
    return True


def _read_keyword(tape: Tape, raw: list[str]) -> Steps[str]:
    """A name and the sign after it; "" where they are not there."""
    key = yield from _read_name(tape, raw)
    yield from tape.space(raw.append)
    sign = yield from tape.accept("=")
    raw.append(sign)
    return key if sign else ""


def _read_name(tape: Tape, raw: list[str]) -> Steps[str]:
    start = len(raw)
    yield from tape.run(_NAME, raw.append)
    return "".join(raw[start:])


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    calls = [(tool.name + "(", f'{_arguments(grammar, tool)} ")"') for tool in demand.tools]
    more = grammar.rule(any_of([f"{quoted(head)} {rest}" for head, rest in calls]))
    others = f'(", " {more}){{0,{MOST_CALLS - 1}}}' if demand.parallel else ""

    def listed(after: str) -> str:
        firsts = [f"{grammar.terminal(rf'/{after}\[/ {quoted(head)}')} {rest}" for head, rest in calls]
        return f'{any_of(firsts)} {others} "]"'

    if demand.required:
        return grammar.only(listed(""))
    if grammar.is_token(_START):
        marked = f"{grammar.mark(_START)} {listed('')}"
    else:
        marked = listed(escaped(_START))
    return grammar.text(any_of([listed(_MARGIN), f"{marked} {grammar.mark(_END)}", grammar.free(_CALL)]))


def _arguments(grammar: Grammar, tool: Tool) -> str:
    what = f"the schema of tool {tool.name!r}"
    members = members_of(grammar.schema(tool), what)
    if members is None:
        pair = grammar.rule(f'{grammar.terminal(r"/[A-Za-z0-9_]{1,64}/")} "=" {grammar.json(True)}')
        return f'({pair} (", " {pair})*)?'
    return _ordered(grammar, [(_member(grammar, member, what), member.required) for member in members])


def _member(grammar: Grammar, member: Member, what: str) -> str:
    if not _NAME.fullmatch(member.name):
        raise ValueError(f"{what} has the property {member.name!r}, which this format of calls cannot write")
    return grammar.rule(f"{quoted(member.name + '=')} {grammar.json(member.schema)}")


def _ordered(grammar: Grammar, members: list[tuple[str, bool]]) -> str:
    """Members in their order with commas between them, where some may be missing."""
    first, later = quoted(""), quoted("")
    for member, required in reversed(members):
        with_it = f"{member} {later}"
        first = grammar.rule(with_it if required else f"{with_it} | {first}")
        comma = f'", " {with_it}'
        later = grammar.rule(comma if required else f"({comma}) | {later}")
    return first


PYTHONIC = ToolFormat("pythonic", (_START, _END), _read, _write)
