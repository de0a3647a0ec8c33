"""JSON Schemas as values, before anything compiles them. Pure; knows no grammar and no tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

type Schema = Mapping[str, object]

_OF_NAMES = frozenset(("properties", "$defs", "definitions", "patternProperties"))
"""Keywords that hold schemas by name."""
_OF_MANY = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
_OF_ONE = frozenset(("items", "additionalProperties", "additionalItems", "contains"))
_COMBINE = frozenset(("anyOf", "oneOf", "if", "not", "$ref", "$dynamicRef", "dependentSchemas"))
"""Keywords that say more of the object that `properties` beside them speaks of."""
_COUNT = frozenset(("minProperties", "propertyNames", "dependentRequired", "dependencies"))
_OPEN = frozenset(("additionalProperties", "patternProperties", "unevaluatedProperties"))


def closed(schema: Schema) -> Schema:
    """The schema, in which objects that list their properties and say nothing of others have no others.

    What satisfies the result satisfies the schema. One that describes an object in several places that must all hold is
    left as it is: closed, they would exclude each other.
    """
    return schema if any(_combines(part) for part in _parts(schema)) else _closed(schema)


def _combines(schema: Schema) -> bool:
    joined = schema.get("allOf")
    several = isinstance(joined, list) and len(cast(list[object], joined)) > 1
    beside = "properties" in schema and bool((_COMBINE | {"allOf"}) & schema.keys())
    return several or beside


def _parts(schema: Schema) -> Iterator[Schema]:
    """The schema and all schemas in it."""
    unseen = [schema]
    while unseen:
        part = unseen.pop()
        yield part
        for key, value in part.items():
            unseen += [inner for inner in _inside(key, value) if isinstance(inner, Mapping)]


def _inside(key: str, value: object) -> list[Schema]:
    """The schemas that a keyword holds; true and false are not among them."""
    found: list[object] = []
    if key in _OF_NAMES and isinstance(value, Mapping):
        found = list(cast(Schema, value).values())
    elif key in _OF_MANY and isinstance(value, list):
        found = cast(list[object], value)
    elif key in _OF_ONE:
        found = [value]
    return [cast(Schema, inner) for inner in found if isinstance(inner, Mapping)]


def _closed(schema: Schema) -> dict[str, object]:
    found = {key: _with_closed_parts(key, value) for key, value in schema.items()}
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return found
    known = all(isinstance(name, str) and name in properties for name in cast(list[object], required))
    if known and not (_OPEN | _COUNT) & schema.keys():
        found["additionalProperties"] = False
    return found


def _with_closed_parts(key: str, value: object) -> object:
    if key in _OF_NAMES and isinstance(value, Mapping):
        return {name: _one(inner) for name, inner in cast(Schema, value).items()}
    if key in _OF_MANY and isinstance(value, list):
        return [_one(inner) for inner in cast(list[object], value)]
    return _one(value) if key in _OF_ONE else value


def _one(value: object) -> object:
    return _closed(cast(Schema, value)) if isinstance(value, Mapping) else value
