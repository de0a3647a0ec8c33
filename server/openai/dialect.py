"""How the model that is served writes what is not plain text: its tool calls, its reasoning, the tokens of its markers.

Chosen by the server's options, else read from the chat template. Knows no request.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxserve.config import ServerConfig
from server.openai.templates import Template, read
from server.parsers.registry import (
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    reasoning_format_of,
    tool_format,
    tool_format_of,
)
from server.service import Tokenizer

log = logging.getLogger("jaxserve.server")

NO_REASONING = "none"
IN_WORDS = "json"
"""The format of calls that a model is told of in words, because its template knows no tools."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The template of a conversation and the formats of the answer to it."""

    template: Template
    tools: ToolFormat
    reasoning: ReasoningFormat | None


@lru_cache(maxsize=16)
def dialect_of(template: str, tool_call_parser: str | None, reasoning_parser: str | None) -> Dialect:
    """The dialect that goes with a chat template. The parsers are the server's options."""
    found = read(template)
    thoughts = reasoning_format_of(template) if reasoning_parser is None else reasoning_parser
    return Dialect(
        found,
        tool_format(_calls(found, tool_call_parser)),
        None if thoughts in (None, NO_REASONING) else reasoning_format(thoughts),
    )


def check_parsers(server: ServerConfig) -> None:
    """Whether the parsers that the options name exist.

    Raises:
        ValueError: one does not; the message lists those that do.
    """
    if server.tool_call_parser is not None:
        tool_format(server.tool_call_parser)
    if server.reasoning_parser not in (None, NO_REASONING):
        reasoning_format(server.reasoning_parser)


def _calls(template: Template, option: str | None) -> str:
    """The name of the tool call format."""
    if template.knows_tools:
        return tool_format_of(template.text) if option is None else option
    if option not in (None, IN_WORDS):
        log.warning("the chat template knows no tools: calls are written as %s, not as %s", IN_WORDS, option)
    return IN_WORDS


@lru_cache(maxsize=4)
def special_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """The tokenizer's special tokens by their text."""
    return {tokenizer.token_bytes(id).decode("utf-8", "replace"): id for id in sorted(tokenizer.special_ids)}


def spelling(text: str, tokenizer: Tokenizer) -> str:
    """A marker in a grammar for llguidance: a special token by its id, other text as a string."""
    found = special_tokens(tokenizer).get(text)
    return json.dumps(text, ensure_ascii=False) if found is None else f"<[{found}]>"


def shown(formats: Sequence[ToolFormat | ReasoningFormat], tokenizer: Tokenizer) -> frozenset[str]:
    """The special tokens that must stay in the text, so that the formats' machines see them."""
    known = special_tokens(tokenizer)
    return frozenset(text for found in formats for text in found.specials if text in known)
