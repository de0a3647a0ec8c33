"""The format of Qwen3 Coder: one tag for each argument, with its value as plain text.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The tool's schema says which JSON type a value is; where it says nothing, the value is a string. One line break on each
side of a value is not part of it. Strings go out as they come, other values when they are complete.
"""

from __future__ import annotations

import re

from llguidance import regex_to_lark

from server.parsers.engine import Found, Markers, Sink, Steps, Tape, nowhere
from server.parsers.grammar import Grammar, any_of, escaped, quoted
from server.parsers.json_text import is_scalar
from server.parsers.python_text import inside_string, json_of_literal
from server.parsers.schemas import Member, bound_of, forms_of, kinds_of, members_of, property_of, values_of
from server.parsers.tools import Demand, Schema, Tool, ToolFormat, Tools

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_PARAMETER_END = "</parameter>"

_OPENINGS = Markers(_OPEN, _FUNCTION)
_VALUE_ENDS = Markers("\n" + _PARAMETER_END, _PARAMETER_END)
_NAME = re.compile(r"[^<>\n]*")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)", re.ASCII)


def _read(tape: Tape, found: Found, tools: Tools) -> Steps[None]:
    while opening := (yield from tape.until(_OPENINGS, found.content)):
        raw = [opening]
        if opening == _OPEN:
            yield from tape.space(raw.append)
            raw.append((yield from tape.accept(_FUNCTION)))
        name = (yield from _read_name(tape, raw.append)) if raw[-1] else ""
        if not name:
            found.content("".join(raw))
            continue
        found.start(name)
        if (yield from _read_arguments(tape, found, tools.get(name))):
            yield from tape.space(nowhere)
            yield from tape.accept(_CLOSE)


def _read_name(tape: Tape, keep: Sink) -> Steps[str]:
    """A name and the bracket after it; "" where they are not there."""
    pieces: list[str] = []
    yield from tape.run(_NAME, pieces.append)
    end = yield from tape.accept(">")
    keep("".join(pieces) + end)
    return "".join(pieces).strip() if end else ""


def _read_arguments(tape: Tape, found: Found, tool: Tool | None) -> Steps[bool]:
    before = "{"
    while True:
        yield from tape.space(nowhere)
        word = yield from tape.accept(_PARAMETER, _FUNCTION_END, _CLOSE)
        if word != _PARAMETER:
            break
        raw = [word]
        name = yield from _read_name(tape, raw.append)
        if not name:
            found.content("".join(raw))
            return False
        found.arguments(f'{before}"{inside_string(name)}": ')
        if not (yield from _read_parameter(tape, found, tool, name)):
            return False
        before = ", "
    if word:
        found.arguments("{}" if before == "{" else "}")
        found.end()
    return word == _FUNCTION_END


def _read_parameter(tape: Tape, found: Found, tool: Tool | None, name: str) -> Steps[bool]:
    parameters = tool.parameters if tool else None
    kinds = kinds_of(property_of(parameters, name), parameters)
    yield from tape.accept("\n")
    if kinds <= {"string"}:
        found.arguments('"')
        end = yield from tape.until(_VALUE_ENDS, lambda text: found.arguments(inside_string(text)))
        if end:
            found.arguments('"')
        return bool(end)
    pieces: list[str] = []
    end = yield from tape.until(_VALUE_ENDS, pieces.append)
    if end:
        found.arguments(_typed("".join(pieces), kinds))
    return bool(end)


def _typed(text: str, kinds: frozenset[str]) -> str:
    """The value as JSON: of the first of its types that the text can be, else a string."""
    word = text.strip()
    if "null" in kinds and word.lower() in ("null", "none"):
        return "null"
    if "boolean" in kinds and word.lower() in ("true", "false"):
        return word.lower()
    if "integer" in kinds and _INTEGER.fullmatch(word):
        return word
    if "number" in kinds and is_scalar(word) and not word.isalpha():
        return word
    if kinds & {"object", "array"} and word[:1] in ("{", "[", "("):
        found = json_of_literal(word)
        if found is not None:
            return found
    return f'"{inside_string(text)}"'


def _write(demand: Demand) -> str:
    grammar = Grammar(demand)
    calls = [f"{quoted(f'{tool.name}>\n')} {_arguments(grammar, tool)}" for tool in demand.tools]
    body = f'"\\n" {quoted(_FUNCTION)} {any_of(calls)} {quoted(f"{_FUNCTION_END}\n")} {grammar.mark(_CLOSE)}'
    return grammar.marked(_OPEN, body)


def _arguments(grammar: Grammar, tool: Tool) -> str:
    what = f"the schema of tool {tool.name!r}"
    members = members_of(grammar.schema(tool), what)
    if members is None:
        key = grammar.terminal(r"/[^<>\s\x00-\x1f]{1,64}/")
        return f"({quoted(_PARAMETER)} {key} {quoted('>\n')} {_string(grammar, {})} {quoted('\n')})*"
    parts = [_member(grammar, member, what) + ("" if member.required else "?") for member in members]
    return " ".join(parts) or quoted("")


def _member(grammar: Grammar, member: Member, what: str) -> str:
    if _NAME.fullmatch(member.name) is None:
        raise ValueError(f"{what} has the property {member.name!r}, which this format of calls cannot write")
    head = quoted(f"{_PARAMETER}{member.name}>\n")
    forms = forms_of(member.schema, f"{what}, property {member.name!r},")
    return grammar.rule(f"{head} {any_of([_form(grammar, form) for form in forms])} {quoted('\n')}")


def _form(grammar: Grammar, form: Schema) -> str:
    """One alternative of a value, with the closing tag."""
    close = quoted("\n" + _PARAMETER_END)
    values = values_of(form)
    if values:
        texts = [quoted(value) if isinstance(value, str) else grammar.json({"const": value}) for value in values]
        return f"{any_of(texts)} {close}"
    if kinds_of(form, form) <= {"string"} and "not" not in form:
        return _string(grammar, form)
    return f"{grammar.json(form)} {close}"


def _string(grammar: Grammar, form: Schema) -> str:
    """Plain text up to the closing tag."""
    least, most = bound_of(form, "minLength"), bound_of(form, "maxLength")
    plain = least is None and most is None
    length = f"{{{least or 0},{'' if most is None else most}}}"
    texts = ["/(?s:.*)/" if plain else f"/(?s:.){length}/", f"~/(?s:.*){escaped(_PARAMETER_END)}(?s:.*)/"]
    if "pattern" in form:
        texts.append(f"/{_searched(str(form['pattern']))}/")
    return grammar.lazy(f"({' & '.join(texts)}) {quoted('\n' + _PARAMETER_END)}")


def _searched(pattern: str) -> str:
    """A pattern that may match anywhere, as one that matches the whole."""
    whole = "|" not in pattern
    start = whole and pattern.startswith("^")
    end = whole and pattern.endswith("$") and not pattern.endswith("\\$")
    inner = regex_to_lark(pattern[start : len(pattern) - end], "dw")
    return f"{'' if start else '(?s:.*)'}({inner}){'' if end else '(?s:.*)'}"


QWEN3_CODER = ToolFormat("qwen3_coder", (_OPEN, _CLOSE), _read, _write)
