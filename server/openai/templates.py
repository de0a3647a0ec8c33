"""What can be told of a chat template by reading it: what it takes, and which switches it has.

Templates agree on little beyond role and content. What is found here decides how a conversation is handed to one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import Environment, TemplateError, nodes

_GENERATION = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
"""Tags that transformers adds to Jinja; they write nothing."""
_SHORT_IDS = re.compile(r"length\s*(?:!=|<)\s*9\b")
_SWITCHES = ("enable_thinking", "thinking")
_OBJECT_FILTERS = ("tojson", "items", "dictsort")


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template."""

    text: str
    variables: frozenset[str]
    """What it reads of what it is given: messages, and perhaps tools, documents, reasoning_effort and so on."""
    takes_parts: bool
    """It goes through the parts of a message's content."""
    takes_strings: bool
    """It takes a content that is one string; false only where it knows nothing but parts."""
    takes_objects: bool
    """It writes the arguments of earlier calls as JSON itself. Otherwise they must be JSON text already."""
    wants_short_ids: bool
    """Ids of calls must have nine characters (Mistral's)."""

    @property
    def knows_tools(self) -> bool:
        """It tells the model of tools. Otherwise they must stand in the messages."""
        return "tools" in self.variables

    @property
    def switch(self) -> str | None:
        """The variable that turns thinking on and off, if there is one."""
        return next((name for name in _SWITCHES if name in self.variables), None)


def read(text: str) -> Template:
    """Reads a template, and runs nothing of it. What is wrong with it, rendering says."""
    short_ids = _SHORT_IDS.search(text) is not None
    try:
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION.sub("", text))
        variables = _variables(tree)
    except (TemplateError, RecursionError, MemoryError):
        return Template(text, frozenset(), False, True, True, short_ids)
    parts = any(_is_field(loop.iter, "content") for loop in tree.find_all(nodes.For))
    tested = any(test.name == "string" and _is_field(test.node, "content") for test in tree.find_all(nodes.Test))
    return Template(text, variables, parts, tested or not parts, _takes_objects(tree), short_ids)


def _variables(tree: nodes.Template) -> frozenset[str]:
    """Names that are read before the template itself has certainly given them a value."""
    return frozenset(_reads(tree, set()))


def _reads(node: nodes.Node, own: set[str]) -> Iterator[str]:
    """Names that are read while they may have no value. `own`: those that have one before; more are added to it."""
    match node:
        case nodes.Name():
            if node.ctx == "store":
                own.add(node.name)
            elif node.ctx == "load" and node.name not in own:
                yield node.name
        case nodes.If():
            yield from _reads_of_branches(node, own)
        case nodes.For():
            yield from _reads(node.iter, own)
            inner = set(own)
            for child in node.iter_child_nodes(exclude=("iter",)):
                yield from _reads(child, inner)
        case nodes.Assign():
            yield from _reads(node.node, own)
            yield from _reads(node.target, own)
        case _:
            for child in node.iter_child_nodes():
                yield from _reads(child, own)


def _reads_of_branches(node: nodes.If, own: set[str]) -> Iterator[str]:
    """Afterwards a name has a value only if every branch gives it one."""
    ends: list[set[str]] = []
    for branch in (node, *node.elif_):
        yield from _reads(branch.test, own)
        ends.append(set(own))
        for child in branch.body:
            yield from _reads(child, ends[-1])
    ends.append(set(own))
    for child in node.else_:
        yield from _reads(child, ends[-1])
    own |= set[str].intersection(*ends)


def _takes_objects(tree: nodes.Template) -> bool:
    written = any(_is_field(node, "arguments") for node in tree.find_all((nodes.Getattr, nodes.Getitem)))
    return not written or any(_is_field(node, "arguments") for node in _objects(tree))


def _objects(tree: nodes.Template) -> Iterator[nodes.Node]:
    """What is used as an object: written as JSON, gone through by its items, or asked for its type."""
    for filtered in tree.find_all(nodes.Filter):
        if filtered.name in _OBJECT_FILTERS and filtered.node is not None:
            yield filtered.node
    for field in tree.find_all(nodes.Getattr):
        if field.attr == "items":
            yield field.node
    for test in tree.find_all(nodes.Test):
        if test.name in ("mapping", "string"):
            yield test.node


def _is_field(node: nodes.Node, name: str) -> bool:
    """`x.name`, `x['name']`, or a variable of that name."""
    match node:
        case nodes.Getattr(attr=found):
            return found == name
        case nodes.Getitem(arg=nodes.Const(value=found)):
            return found == name
        case nodes.Name(name=found):
            return found == name
        case _:
            return False
