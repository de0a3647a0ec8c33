"""Writes the Lark text of what an answer with tool calls may be. The formats say what their calls look like.

Free text is everything before a call's marker: a lazy lexeme ends at the first marker, so that what follows has to be
a call. Where the marker is a special token it cannot be part of a lexeme, and the free text excludes its spelling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from jaxserve.schema import closed
from server.parsers.schemas import parameters_of
from server.parsers.tools import Demand, Tool

WHITESPACE = r"(\r?\n[ \t]{0,40}| ?)"
"""Between the parts of JSON: a line break with some indentation, or a blank; never without end."""
MOST_CALLS = 16
"""In one answer: a model that only knows how to go on cannot go on for ever."""
MAX_SCHEMAS = 512 * 1024
"""Characters of all schemas in a grammar: longer ones are not compiled anyway."""


def quoted(text: str) -> str:
    """`text` itself, in Lark."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """`text` itself, in a regular expression between slashes."""
    return re.sub(r"[^\w\s<>=]", lambda found: "\\" + found[0] if found[0].isascii() else found[0], text).replace(
        "\n", r"\n"
    )


def any_of(choices: list[str]) -> str:
    """One of these expressions."""
    return "(" + " | ".join(choices) + ")"


def _any_text(without: tuple[str, ...]) -> str:
    return "/(?s:.*)/" + "".join(f" & ~/{pattern}/" for pattern in without)


class Grammar:
    """Rules under way."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self._rules: list[str] = []
        self._size = 0

    def mark(self, text: str) -> str:
        """A marker: its text, or its special token."""
        return self.demand.spell(text)

    def is_token(self, mark: str) -> bool:
        """Whether the marker is a special token, which no lexeme can hold."""
        return self.mark(mark).startswith("<")

    def rule(self, body: str) -> str:
        """A name for an expression."""
        return self._named("r", body)

    def terminal(self, body: str) -> str:
        """A name for an expression that is read as one lexeme."""
        return self._named("T", body)

    def free(self, *without: str) -> str:
        """Any text that matches none of these regular expressions."""
        return self.terminal(_any_text(without))

    def free_of(self, mark: str, *without: str) -> str:
        """Any text without this marker, that matches none of these either."""
        return self.free(rf"(?s:.*){escaped(mark)}(?s:.*)", *without)

    def lazy(self, body: str) -> str:
        """A name for a lexeme that ends as soon as it can."""
        return self._named("r", body, "[lazy]")

    def until(self, mark: str, *without: str) -> str:
        """Any text up to the first such marker, and the marker. The text matches none of these regular expressions."""
        if self.is_token(mark):
            return f"{self.free_of(mark, *without)} {self.mark(mark)}"
        return self.lazy(f"({_any_text(without)}) {quoted(mark)}")

    def arguments(self, tool: Tool) -> str:
        """The arguments of a call as one JSON object."""
        return self.json(self.schema(tool))

    def json(self, schema: Mapping[str, object] | bool) -> str:
        """A JSON text of this schema.

        ValueError: all schemas together are too long. Those of arguments repeat the definitions that they may refer to.
        """
        options = {"whitespace_pattern": WHITESPACE}
        document = {**schema, "x-guidance": options} if isinstance(schema, Mapping) else schema
        text = "%json " + json.dumps(document, ensure_ascii=False)
        self._size += len(text)
        if self._size > MAX_SCHEMAS:
            raise ValueError(f"their schemas make a grammar of more than {MAX_SCHEMAS} characters; make them shorter")
        return text

    def schema(self, tool: Tool) -> Mapping[str, object]:
        """What the arguments have to be: of the tool's schema where that is promised, any object elsewhere.

        Objects that do not speak of other properties get none.
        """
        return closed(parameters_of(tool)) if self.demand.required or tool.strict else {"type": "object"}

    def object_calls(self, arguments: str = "arguments", *, after: str = "") -> str:
        """A call of any tool as an object with name and arguments, spaced as templates write it.

        `after`: a regular expression of what stands before it. Its beginning is one lexeme with that, so that it can
        compete with free text.
        """
        return self.rule(any_of([self._object_call(tool, arguments, after) for tool in self.demand.tools]))

    def several(self, call: str, between: str) -> str:
        """One call, or as many as allowed."""
        return f"{call} ({between} {call}){{0,{MOST_CALLS - 1}}}" if self.demand.parallel else call

    def marked(self, mark: str, call: str, between: str = r"/\n?/") -> str:
        """The grammar of calls that begin with a marker each; `call`: what follows the marker."""
        if self.demand.required:
            return self.only(self.several(self.rule(f"{self.mark(mark)} {call}"), between))
        many = f"{{0,{MOST_CALLS}}}" if self.demand.parallel else "?"
        return self.text(f"({self.until(mark)} {call}){many} {self.free_of(mark)}")

    def only(self, calls: str) -> str:
        """The whole grammar, of nothing but calls. Models that think go on with an empty line."""
        return self.text(rf"/\n{{0,2}}/ {calls}")

    def text(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def _object_call(self, tool: Tool, arguments: str, after: str) -> str:
        head = quoted(f'{{"name": {quoted(tool.name)}, "{arguments}": ')
        return f'{self.terminal(f"/{after}/ {head}") if after else head} {self.arguments(tool)} "}}"'

    def _named(self, letter: str, body: str, options: str = "") -> str:
        name = f"{letter}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name
