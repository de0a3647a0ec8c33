"""What a chat request says of tools: which there are, and which calls of them it wants.

Knows no format of calls and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import msgspec
from msgspec import Struct

from server.errors import bad_request
from server.openai.protocol import Json
from server.parsers.tools import Tool

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")

type Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    `none`: the model is told of the tools, as its template does it, but all that it says is content. `auto`: it may
    call those of `callable`. `required`: it must; `named`: the only one, once.
    """

    schemas: tuple[Mapping[str, object], ...] = ()
    """As they were given, for the template."""
    offered: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    """Those of `offered` that the request allows."""
    mode: Mode = "none"
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")

    @property
    def needs_grammar(self) -> bool:
        """Something is promised of calls that the model alone cannot be trusted with."""
        limited = len(self.callable) < len(self.offered)
        return self.forced or (self.mode == "auto" and (limited or any(tool.strict for tool in self.callable)))


class _Function(Struct, kw_only=True, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Json] | None = None
    strict: bool | None = None


class _ToolSpec(Struct, kw_only=True, frozen=True):
    function: _Function


class _Named(Struct, kw_only=True, frozen=True):
    name: str


class _Choice(Struct, kw_only=True, frozen=True):
    """`tool_choice` as an object, and an entry of `allowed_tools.tools`."""

    type: str
    function: _Named | None = None
    allowed_tools: _Allowed | None = None


class _Allowed(Struct, kw_only=True, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[_Choice]


def tool_use(
    tools: Sequence[Mapping[str, Json]] | None, choice: str | Mapping[str, Json] | None, parallel: bool | None
) -> ToolUse:
    """The request's `tools`, `tool_choice` and `parallel_tool_calls`.

    Raises:
        ApiError: 400, they are not well formed, or do not fit together.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return ToolUse()
    if not tools:
        raise bad_request("tools must not be empty: leave it out", "tools")
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools takes at most {MAX_TOOLS}, got {len(tools)}", "tools")
    found = tuple(_tool(spec, f"tools[{i}]") for i, spec in enumerate(tools))
    names = [tool.name for tool in found]
    twice = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if twice is not None:
        raise bad_request(f"tools has two functions named {twice!r}", "tools")
    use = ToolUse(tuple(tools), found, found, "auto", parallel is not False)
    return use if choice is None else _chosen(use, choice)


def _tool(spec: Mapping[str, Json], where: str) -> Tool:
    kind = spec.get("type", "function")
    if kind != "function":
        what = f"is {kind[:100]!r}" if isinstance(kind, str) else "is no string"
        raise bad_request(f"{where}.type {what}, but only function tools are served", "tools")
    function = _converted(spec, _ToolSpec, where, "tools").function
    if not _NAME.fullmatch(function.name):
        rule = "must be 1 to 64 letters, digits, _, - or ."
        raise bad_request(f"{where}.function.name {rule}, got {function.name[:100]!r}", "tools")
    return Tool(function.name, function.description, function.parameters, bool(function.strict))


def _chosen(use: ToolUse, choice: str | Mapping[str, Json]) -> ToolUse:
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            rule = "must be none, auto, required or an object that names a function"
            raise bad_request(f"tool_choice {rule}, got {choice[:100]!r}", "tool_choice")
        return replace(use, mode=cast(Mode, choice))
    wanted = _converted(choice, _Choice, "tool_choice", "tool_choice")
    if wanted.type == "allowed_tools" and wanted.allowed_tools is not None:
        allowed = [_named(use, entry, "tool_choice.allowed_tools.tools") for entry in wanted.allowed_tools.tools]
        if not allowed:
            raise bad_request("tool_choice.allowed_tools.tools must not be empty", "tool_choice")
        kept = tuple(tool for tool in use.offered if tool in allowed)
        return replace(use, callable=kept, mode=wanted.allowed_tools.mode)
    return replace(use, callable=(_named(use, wanted, "tool_choice"),), mode="named", parallel=False)


def _named(use: ToolUse, wanted: _Choice, where: str) -> Tool:
    if wanted.type != "function" or wanted.function is None:
        form = '{"type": "function", "function": {"name": ...}}'
        raise bad_request(f"{where} must be {form}", "tool_choice")
    name = wanted.function.name
    found = next((tool for tool in use.offered if tool.name == name), None)
    if found is None:
        raise bad_request(f"{where} names {name[:100]!r}, which is not in tools", "tool_choice")
    return found


def _converted[T](given: Mapping[str, Json], kind: type[T], where: str, param: str) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise bad_request(f"{where}{path.rstrip('`')}: {text}", param) from None
