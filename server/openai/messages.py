"""Messages of a request as chat templates know them: checked, tool calls with parsed arguments, tools told in words.

Pure: records in, plain dictionaries out. What a template takes is in `templates`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import msgspec
from msgspec import Struct

from server.errors import bad_request
from server.openai.protocol import ROLES, TEXT_PARTS, ContentPart, Json, Message
from server.openai.templates import Template
from server.openai.tools import ToolUse
from server.parsers.tools import Tool

type Told = dict[str, object]
"""A message for a template."""

MAX_DEPTH = 100
"""Levels of the arguments of an earlier call."""


class _Called(Struct, kw_only=True, frozen=True):
    name: str
    arguments: Json = None


class _Call(Struct, kw_only=True, frozen=True):
    """A tool call of an earlier answer."""

    function: _Called
    id: str | None = None
    type: str = "function"


def told(messages: Sequence[Message], template: Template, content_format: str) -> list[Told]:
    """The messages for `template`. `content_format`: string, openai (parts), or auto.

    Auto hands on parts where the template goes through them; results of tools stay strings, which all templates take.

    Raises:
        ApiError: 400, a message is not well formed, or not only text.
    """
    found = [_fitted(entry, template) for entry in checked(messages)]
    if content_format == "string" or (content_format == "auto" and not template.takes_parts):
        return found
    found = [_with_parts(entry, given, content_format) for entry, given in zip(found, messages, strict=True)]
    return found if content_format == "auto" and template.takes_strings else as_parts(found)


def checked(messages: Sequence[Message]) -> list[Told]:
    """The messages with contents that are strings.

    Raises:
        ApiError: 400, a message is not well formed, or not only text.
    """
    named: dict[str, str] = {}
    return [_told(message, f"messages[{i}]", named) for i, message in enumerate(messages)]


def as_parts(messages: Sequence[Told]) -> list[Told]:
    """The messages with contents that are lists of parts."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}] if m["content"] else []}
        if isinstance(m["content"], str)
        else m
        for m in messages
    ]


def in_words(messages: Sequence[Told], use: ToolUse) -> list[Told]:
    """The messages for a template that knows no tools: calls and results as text, tools in the first message.

    The form of the calls is that of the `json` format. Contents are strings.
    """
    plain: list[Told] = []
    result_before = False
    for message in messages:
        entry, result = _plain(message), message["role"] == "tool"
        if plain and plain[-1]["role"] == entry["role"] == "user" and (result or result_before):
            before = plain.pop()
            entry = {**entry, "content": f"{before['content']}\n\n{entry['content']}"}
        plain.append(entry)
        result_before = result
    if use.mode == "none":
        return plain
    text = preamble(use)
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def without_system(messages: Sequence[Told]) -> list[Told]:
    """The first system message at the head of the first message of the user: for templates that have no such role."""
    first, rest = messages[0], list(messages[1:])
    at = next((i for i, message in enumerate(rest) if message["role"] == "user"), None)
    if first["role"] != "system" or at is None:
        return list(messages)
    rest[at] = {**rest[at], "content": f"{first['content']}\n\n{rest[at]['content']}"}
    return rest


def preamble(use: ToolUse) -> str:
    """What a model is told of its tools, where its template does not do it."""
    lines = [_line(_described(tool)) for tool in use.callable]
    how = '{"name": "the tool\'s name", "arguments": {"argument": "value"}}'
    parts = ["You can call these tools. Each line describes one, with a JSON Schema of its arguments:", *lines]
    parts.append(f"To call a tool, answer with nothing but a JSON object of this form:\n{how}")
    if use.parallel:
        parts.append("To call several, answer with a JSON array of such objects.")
    if use.mode == "auto":
        parts.append("If no tool helps, answer in words.")
    if use.mode == "required":
        parts.append("This time you must call a tool.")
    if use.mode == "named":
        parts.append(f"This time you must call {use.callable[0].name}.")
    return "\n".join(parts)


def _described(tool: Tool) -> Told:
    found: Told = {"name": tool.name}
    if tool.description:
        found["description"] = tool.description
    return {**found, "parameters": tool.parameters or {"type": "object", "properties": {}}}


def _told(message: Message, where: str, named: dict[str, str]) -> Told:
    """OpenAI's `developer` is what templates call `system`. `named`: function names by the ids of their calls."""
    if message.role == "function" or message.function_call is not None:
        text = f"{where}: functions are the old form of tools: send tool_calls, and results with role 'tool'"
        raise bad_request(text, "messages", "unsupported_parameter")
    if message.role not in ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(ROLES)}, got {message.role[:100]!r}", "messages")
    role = "system" if message.role == "developer" else message.role
    found: Told = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        found["name"] = message.name
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    if message.tool_calls:
        if role != "assistant":
            raise bad_request(f"{where}: only the assistant has tool_calls", "messages")
        found["tool_calls"] = [_call(c, f"{where}.tool_calls[{i}]", named) for i, c in enumerate(message.tool_calls)]
    if role == "tool":
        if message.tool_call_id is None:
            raise bad_request(f"{where}.tool_call_id is missing", "messages")
        found["tool_call_id"] = message.tool_call_id
        if message.name is None and message.tool_call_id in named:
            found["name"] = named[message.tool_call_id]
    return found


def _text(message: Message, where: str) -> str:
    """Text parts, joined by newlines."""
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise bad_request(f"{where}.content is missing", "messages")
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content))


def _part(part: ContentPart, where: str) -> str:
    if part.type not in TEXT_PARTS:
        raise bad_request(f"{where}.type is {part.type[:100]!r}, but this model takes only text", "messages")
    text = part.refusal if part.type == "refusal" else part.text
    if text is None:
        raise bad_request(f"{where}.text is missing", "messages")
    return text


def _call(given: Mapping[str, Json], where: str, named: dict[str, str]) -> Told:
    try:
        call = msgspec.convert(given, _Call)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        raise bad_request(f"{where}{path.rstrip('`')}: {text}", "messages") from None
    if call.type != "function":
        raise bad_request(f"{where}.type is {call.type[:100]!r}, but only function calls are served", "messages")
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments")
    found: Told = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        found["id"] = call.id
        named[call.id] = call.function.name
    return found


def _arguments(given: Json, where: str) -> dict[str, object]:
    """An object from its JSON text; nothing stands for an empty one."""
    value = given
    if isinstance(given, str) and given.strip():
        try:
            value = cast(object, msgspec.json.decode(given))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise bad_request(f"{where} is not valid JSON: {error}", "messages") from None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be the JSON text of an object", "messages")
    if _nests(cast(object, value)):
        raise bad_request(f"{where} nests deeper than {MAX_DEPTH} levels", "messages")
    return cast(dict[str, object], value)


def _nests(value: object) -> bool:
    """Whether a JSON value is too deep for those who go through it by recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return cast(dict[str, object], value).values()
    return cast(list[object], value) if isinstance(value, list) else ()


def _with_parts(entry: Told, given: Message, content_format: str) -> Told:
    """The message with its parts as they were given, if they were."""
    if isinstance(given.content, str | None) or (given.role == "tool" and content_format == "auto"):
        return entry
    texts = [part.refusal if part.type == "refusal" else part.text for part in given.content]
    return {**entry, "content": [{"type": "text", "text": text} for text in texts]}


def _fitted(entry: Told, template: Template) -> Told:
    """Calls as this template writes them."""
    if template.wants_short_ids:
        entry = _with_short_ids(entry)
    if "tool_calls" not in entry or template.takes_objects:
        return entry
    calls = cast(list[Told], entry["tool_calls"])
    return {**entry, "tool_calls": [_with_text(call) for call in calls]}


def _with_text(call: Told) -> Told:
    function = cast(Told, call["function"])
    return {**call, "function": {**function, "arguments": _line(function["arguments"])}}


def _with_short_ids(entry: Told) -> Told:
    changed = dict(entry)
    if "tool_call_id" in entry:
        changed["tool_call_id"] = short_id(str(entry["tool_call_id"]))
    if "tool_calls" in entry:
        calls = cast(list[Told], entry["tool_calls"])
        changed["tool_calls"] = [{**call, "id": short_id(str(call.get("id", i)))} for i, call in enumerate(calls)]
    return changed


def short_id(given: str) -> str:
    """Nine letters and digits: the last ones of `given`."""
    return re.sub(r"[^a-zA-Z0-9]", "", given)[-9:].rjust(9, "0")


def _plain(message: Told) -> Told:
    """A message without calls."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"Result of {message.get('name', 'the tool')}:\n{message['content']}"}
    calls = cast(Sequence[Told], message.get("tool_calls") or ())
    if not calls:
        return message
    lines = [_line(call["function"]) for call in calls]
    text = lines[0] if len(lines) == 1 else f"[{', '.join(lines)}]"
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message['content']}\n{text}" if message["content"] else text}


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
