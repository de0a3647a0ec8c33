"""What a tool and a tool call format are. A format is a reader of answers and a writer of grammars."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from server.parsers.engine import Found, Steps, Tape, TextMachine

type Schema = Mapping[str, object]
type Tools = Mapping[str, Tool]
type Spell = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function the model may call. `parameters`: the JSON schema of its arguments; None or {}: it takes none."""

    name: str
    description: str | None
    parameters: Mapping[str, object] | bool | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Demand:
    """What a grammar has to enforce. `required`: only calls; `parallel`: more than one; `spell`: a marker in Lark."""

    tools: Sequence[Tool]
    required: bool
    parallel: bool
    spell: Spell


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls. `specials`: texts that may be special tokens and must reach the machine."""

    name: str
    specials: tuple[str, ...]
    reader: Callable[[Tape, Found, Tools], Steps[None]]
    writer: Callable[[Demand], str]

    def machine(self, tools: Sequence[Tool]) -> TextMachine:
        """Finds calls in one answer."""
        named = {tool.name: tool for tool in tools}
        return TextMachine(lambda tape, found: self.reader(tape, found, named))

    def grammar(self, tools: Sequence[Tool], *, required: bool, parallel: bool, spell: Spell) -> str:
        """What the whole answer may be, in llguidance's Lark with the rule `start`.

        Required: calls and nothing else, exactly one unless `parallel`. Otherwise free text, in which a call that was
        begun has to be a call of one of the tools, with arguments that are valid for a strict one.
        ValueError: a schema that this format cannot enforce.
        """
        return self.writer(Demand(tools, required, parallel, spell))
