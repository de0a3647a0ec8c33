"""What a request asks of its answer's shape, as llguidance's grammar text. Pure; knows no tokenizer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from jaxserve.grammar import tags
from jaxserve.schema import closed
from jaxserve.types import InvalidRequest, StructuredOutputsParams

MAX_TEXT = 512 * 1024
"""Characters of a schema, grammar, regex or list of choices."""
MAX_DEPTH = 100
"""Nesting of a schema."""
MAX_RULES = 2000
"""Rules of a grammar, references in a schema: the compiler recurses over chains of them."""
WHITESPACE = r"(\r?\n[ \t]{0,40}| ?)"
"""Between the parts of JSON: bounded, so that a model that only knows how to go on cannot go on for ever."""

_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)
_RULE = re.compile(r'^\s*[?!]?[\w.]+\s*(\[[^\]]*\])?\s*:|ref"|\\u', re.MULTILINE)


def grammar_of(asked: StructuredOutputsParams) -> str:
    """The grammar, in a form that llguidance's matcher takes.

    Raises:
        InvalidRequest: it is too large, or not what it should be; the message names the field.
    """
    name = f"structured_outputs.{asked.kind}"
    match asked.kind:
        case "json":
            return _json_grammar(_schema(asked.json, name), asked, name)
        case "json_object":
            return _json_grammar({"type": "object"}, asked, name)
        case "regex":
            return LLMatcher.grammar_from_regex(_sized(asked.regex or "", name))
        case "choice":
            choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice or ())
            return LLMatcher.grammar_from_lark("start: " + _sized(choices, name))
        case "grammar":
            return LLMatcher.grammar_from_lark(_checked_lark(_lark(_sized(asked.grammar or "", name), name), name))
        case "structural_tag":
            text = _sized(asked.structural_tag or "", name)
            lark = tags.lark_of(text, json_options(asked), close=bool(asked.disable_additional_properties))
            return LLMatcher.grammar_from_lark(_checked_lark(lark, name))


def json_options(asked: StructuredOutputsParams) -> dict[str, object]:
    """What llguidance is told about JSON's whitespace."""
    if asked.disable_any_whitespace:
        return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    return {"whitespace_pattern": asked.whitespace_pattern or WHITESPACE}


def _json_grammar(schema: Mapping[str, object], asked: StructuredOutputsParams, name: str) -> str:
    if asked.disable_additional_properties:
        schema = closed(schema)
    text = _sized(json.dumps(schema, ensure_ascii=False), name)
    if text.count('"$ref"') > MAX_RULES:
        raise _refused(name, f"has more than {MAX_RULES} $ref")
    options = json_options(asked)
    return LLMatcher.grammar_from_json_schema(text, defaults=options)  # type: ignore[arg-type]


def _schema(given: object, name: str) -> Mapping[str, object]:
    """The schema as JSON values, whatever kind of mapping it came in.

    A round trip through text also refuses what is not JSON, and nesting that would end the compiler.
    """
    try:
        text = given if isinstance(given, str) else json.dumps(given, default=_plain)
        schema: object = json.loads(_sized(text, name))
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(name, f"is not a JSON Schema: {error or 'it nests too deep'}") from None
    if schema is False:
        raise _refused(name, "is false: no answer can satisfy it")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise _refused(name, "must be a JSON Schema: an object, true or false")
    if _depth(cast(object, schema)) > MAX_DEPTH:
        raise _refused(name, f"nests deeper than {MAX_DEPTH} levels")
    return cast(Mapping[str, object], schema)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(cast(Mapping[str, object], value))
    raise TypeError(f"{type(value).__name__} is not JSON")


def _depth(schema: object) -> int:
    depth, level = 0, [schema]
    while level:
        depth += 1
        level = [inner for outer in level for inner in _inside(outer)]
    return depth


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(cast(dict[str, object], value).values())
    return cast(list[object], value) if isinstance(value, list) else []


def _lark(text: str, name: str) -> str:
    if not _GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise _refused(name, "nests too deep") from None
    except Exception as error:  # the converter fails in its own ways on what is no grammar
        raise _refused(name, f"is no GBNF: {error}") from None


def _checked_lark(text: str, name: str) -> str:
    if sum(1 for _ in _RULE.finditer(text)) > MAX_RULES:
        raise _refused(name, f"has more than {MAX_RULES} rules")
    return text


def _sized(text: str, name: str) -> str:
    if len(text) > MAX_TEXT:
        raise _refused(name, f"has {len(text)} characters, at most {MAX_TEXT} are taken")
    return text


def _refused(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{name} {why}", "structured_outputs")
