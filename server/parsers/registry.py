"""The formats by their names, the default for a chat template, and the machine for one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.parsers.deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from server.parsers.engine import Chain, Found, Steps, Tape, TextMachine
from server.parsers.events import Machine
from server.parsers.harmony import OPENAI, OPENAI_GPTOSS, harmony
from server.parsers.hermes import HERMES
from server.parsers.llama import LLAMA3_JSON
from server.parsers.mistral import MISTRAL
from server.parsers.plain_json import JSON
from server.parsers.pythonic import PYTHONIC
from server.parsers.qwen_coder import QWEN3_CODER
from server.parsers.reasoning import DEEPSEEK_R1, QWEN3, ReasoningFormat
from server.parsers.tools import Tool, ToolFormat

__all__ = [
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ReasoningFormat",
    "Tool",
    "ToolFormat",
    "machine",
    "reasoning_format",
    "reasoning_format_of",
    "tool_format",
    "tool_format_of",
]

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "hermes": HERMES,
    "json": JSON,
    "llama3_json": LLAMA3_JSON,
    "llama4_json": LLAMA3_JSON,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "openai": OPENAI,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_CODER,
    "qwen3_xml": QWEN3_CODER,
}
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "deepseek_r1": DEEPSEEK_R1,
    "openai_gptoss": OPENAI_GPTOSS,
    "qwen3": QWEN3,
}

_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("tool▁calls▁begin", "```json"), "deepseek_v3"),
    (("tool▁calls▁begin",), "deepseek_v31"),
    (("<|channel|>",), "openai"),
    (("<function=",), "qwen3_coder"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("func_name1(",), "pythonic"),
    (("<|start_header_id|>", '"parameters'), "llama3_json"),
    (("<|header_start|>", '"parameters'), "llama3_json"),
    (("<|python_start|>",), "pythonic"),
    (("<|python_tag|>",), "llama3_json"),
)
"""What is written in chat templates, and the format that it is a sign of, all of it. The first counts."""


def tool_format(name: str) -> ToolFormat:
    """The tool call format of this name. ValueError: there is none."""
    return _named("tool call parser", name, TOOL_FORMATS)


def reasoning_format(name: str) -> ReasoningFormat:
    """The reasoning format of this name. ValueError: there is none."""
    return _named("reasoning parser", name, REASONING_FORMATS)


def tool_format_of(chat_template: str) -> str:
    """The name of the tool call format that this template writes."""
    return next((name for signs, name in _SIGNS if all(sign in chat_template for sign in signs)), "json")


def reasoning_format_of(chat_template: str) -> str | None:
    """The name of the reasoning format that this template writes; None where it writes no thoughts."""
    if "<|channel|>" in chat_template:
        return "openai_gptoss"
    if "</think>" not in chat_template:
        return None
    return "deepseek_r1" if "\uff5cAssistant\uff5c" in chat_template else "qwen3"


def machine(
    tools: Sequence[Tool], tool: ToolFormat | None, reasoning: ReasoningFormat | None, *, opened: bool
) -> Machine:
    """Reads one answer: first its reasoning, then calls in what is content.

    `tool` None: text that looks like a call is content. `opened`: the prompt ended inside an open thinking block
    (`reasoning.opened(prompt)`).
    """
    if tool is OPENAI and reasoning is OPENAI_GPTOSS:
        return TextMachine(harmony(opened=opened, calls=True))
    if reasoning is None:
        return TextMachine(_content) if tool is None else tool.machine(tools)
    if tool is None:
        return reasoning.machine(opened)
    return Chain(reasoning.machine(opened), tool.machine(tools))


def _named[T](what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: known are {', '.join(sorted(known))}")
    return known[name]


def _content(tape: Tape, found: Found) -> Steps[None]:
    yield from ()
