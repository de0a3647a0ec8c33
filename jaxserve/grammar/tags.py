"""Structural tags: free text in which a trigger opens a part that has a shape. vLLM's first form, and xgrammar's tree.

First form: {"type": "structural_tag", "structures": [{"begin", "schema", "end"}], "triggers": [...]}.
Tree: {"type": "structural_tag", "format": F}, where F is const_string, json_schema, regex, grammar, any_text, sequence,
or, tag, triggered_tags or tags_with_separator.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import cast

from jaxserve.schema import closed
from jaxserve.types import InvalidRequest

MAX_DEPTH = 32
"""Nesting of formats."""
_ANY = r"/(.|\n)*/"


def lark_of(text: str, options: Mapping[str, object], *, close: bool) -> str:
    """The Lark grammar of a structural tag given as JSON. `options`: llguidance's for JSON; `close`: its schemas.

    Raises:
        InvalidRequest: it is not one, or uses a format that is not known.
    """
    try:
        tag: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"is not JSON: {error}") from None
    tag = _object(tag, "structural_tag")
    writer = _Writer(options, close)
    try:
        if tag.get("format") is not None:
            start = writer.format(tag["format"], 0)
        else:
            start = writer.triggered(_triggers(tag.get("triggers")), [_old_tag(t) for t in _list(tag, "structures")], 0)
    except RecursionError:
        raise _wrong("has a schema that nests too deep") from None
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules])


class _Writer:
    """Grammar rules as they are found; each format becomes one rule."""

    def __init__(self, options: Mapping[str, object], close: bool) -> None:
        self.rules: list[str] = []
        self._options, self._close = options, close

    def format(self, given: object, depth: int) -> str:
        """The name of the rule for a format."""
        if depth > MAX_DEPTH:
            raise _wrong(f"nests deeper than {MAX_DEPTH} levels")
        spec = _object(given, "format")
        match spec.get("type"):
            case "const_string":
                return self._rule(_quoted(_text(spec, "value")))
            case "json_schema":
                return self._rule(self._json(spec.get("json_schema")))
            case "regex":
                return self._rule(_regex(_text(spec, "pattern")))
            case "any_text":
                return self._rule(_ANY)
            case "sequence":
                return self._rule(" ".join(self.format(f, depth + 1) for f in _list(spec, "elements")))
            case "or":
                return self._rule(" | ".join(self.format(f, depth + 1) for f in _list(spec, "elements")))
            case "tag":
                return self._tag(spec, _text(spec, "begin"), depth)
            case "triggered_tags":
                return self._triggered_tags(spec, depth)
            case "tags_with_separator":
                return self._separated(spec, depth)
            case other:
                raise _wrong(f"has the format type {str(other)[:100]!r}, which is not served")

    def triggered(self, triggers: Sequence[str], tags: Sequence[Mapping[str, object]], depth: int) -> str:
        """Free text in which each trigger leads into one of the tags that begin with it."""
        options: list[str] = []
        for trigger in triggers:
            inside = [t for t in tags if _text(t, "begin").startswith(trigger)]
            if inside:
                head = self._rule(f"/(.|\\n)*/ {_quoted(trigger)}", "[lazy]")
                tails = " | ".join(self._tag(t, _text(t, "begin")[len(trigger) :], depth) for t in inside)
                options.append(f"{head} ({tails})")
        lost = [t for t in tags if not any(_text(t, "begin").startswith(trigger) for trigger in triggers)]
        if lost:
            raise _wrong(f"has a tag whose begin {_text(lost[0], 'begin')[:100]!r} starts with none of the triggers")
        return self._rule(f"({' | '.join(options)})* {self._rule(_ANY)}")

    def _triggered_tags(self, spec: Mapping[str, object], depth: int) -> str:
        for option in ("at_least_one", "stop_after_first"):
            if spec.get(option) not in (None, False):
                raise _wrong(f"has {option}, which is not served: use a sequence")
        tags = [_object(t, "tags") for t in _list(spec, "tags")]
        return self.triggered(_triggers(spec.get("triggers")), tags, depth)

    def _separated(self, spec: Mapping[str, object], depth: int) -> str:
        tags = (_object(t, "tags") for t in _list(spec, "tags"))
        one = "(" + " | ".join(self._tag(t, _text(t, "begin"), depth) for t in tags) + ")"
        if spec.get("stop_after_first"):
            return self._rule(one if spec.get("at_least_one") else f"{one}?")
        many = f"{one} ({_quoted(_text(spec, 'separator'))} {one})*"
        return self._rule(many if spec.get("at_least_one") else f"({many})?")

    def _tag(self, spec: Mapping[str, object], begin: str, depth: int) -> str:
        inside = _object(spec.get("content"), "content")
        end = spec.get("end", "")
        ends = cast(list[object], end) if isinstance(end, list) else [end]
        if not ends or not all(isinstance(e, str) for e in ends):
            raise _wrong("has a tag whose end is not text")
        closing = " | ".join(_quoted(str(e)) for e in ends)
        if inside.get("type") == "any_text":
            rest = self._rule(f"{_ANY} ({closing})", "[lazy]")  # up to the first end
        else:
            rest = f"{self.format(inside, depth + 1)} ({closing})"
        return self._rule(f"{_quoted(begin)} {rest}")

    def _json(self, schema: object) -> str:
        body = _object({} if schema is True else schema, "json_schema")
        if self._close:
            body = closed(body)
        return "%json " + json.dumps({**body, "x-guidance": dict(self._options)})

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name


def _old_tag(given: object) -> Mapping[str, object]:
    tag = _object(given, "structures")
    return {**tag, "content": {"type": "json_schema", "json_schema": tag.get("schema", {})}}


def _triggers(given: object) -> list[str]:
    listed = cast(list[object], given) if isinstance(given, list) else []
    if not listed or not all(isinstance(t, str) and t for t in listed):
        raise _wrong("needs triggers: texts that are not empty")
    return [str(t) for t in listed]


def _list(spec: Mapping[str, object], name: str) -> list[object]:
    value = spec.get(name)
    if not isinstance(value, list) or not value:
        raise _wrong(f"needs {name}: a list that is not empty")
    return cast(list[object], value)


def _text(spec: Mapping[str, object], name: str) -> str:
    value = spec.get(name)
    if not isinstance(value, str):
        raise _wrong(f"needs the text {name}")
    return value


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise _wrong(f"needs an object in {where}")
    return cast(Mapping[str, object], value)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex(pattern: str) -> str:
    """Between slashes, where a slash of its own must be escaped."""
    return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\/", pattern) + "/"


def _wrong(why: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.structural_tag {why}", "structured_outputs")
