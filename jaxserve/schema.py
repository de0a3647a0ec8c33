"""JSON Schemas as values, before anything compiles them. Pure; knows no grammar and no tool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

_OF_NAMES = frozenset(("properties", "$defs", "definitions", "dependentSchemas", "patternProperties"))
"""Keywords that hold schemas by name."""
_OF_MANY = frozenset(("anyOf", "oneOf", "prefixItems"))
_OF_ONE = frozenset(("items", "additionalProperties", "additionalItems", "contains", "if", "then", "else"))
_OPEN = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref"))
"""An object that has one of these says more of its properties than `properties` does."""


def closed(schema: Mapping[str, object]) -> dict[str, object]:
    """The schema, in which objects that list their properties and say nothing of others have no others.

    Its language is a part of the schema's. What `allOf` joins is left as it is: closed parts would exclude each other.
    """
    found = {key: _closed(key, value) for key, value in schema.items()}
    if "properties" in found and not _OPEN & found.keys():
        found["additionalProperties"] = False
    return found


def _closed(key: str, value: object) -> object:
    if key in _OF_NAMES and isinstance(value, Mapping):
        return {name: _one(inner) for name, inner in cast(Mapping[str, object], value).items()}
    if key in _OF_MANY and isinstance(value, list):
        return [_one(inner) for inner in cast(list[object], value)]
    return _one(value) if key in _OF_ONE else value


def _one(value: object) -> object:
    return closed(cast(Mapping[str, object], value)) if isinstance(value, Mapping) else value
