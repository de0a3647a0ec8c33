"""What a tool's schema says of its arguments, for the formats that write them one by one.

Looks at the top of a schema and through `$ref`, `anyOf` and the like with bounded effort; knows no format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from server.parsers.tools import Tool

type Json = Mapping[str, object]

MAX_DEPTH = 100
_LOOKS = 200
_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    dict: "object",
    list: "array",
}
_DEFINITIONS = ("$defs", "definitions")
_RELATIONS = frozenset(
    (
        "anyOf oneOf allOf not if then else patternProperties propertyNames minProperties maxProperties"
        " dependentRequired dependentSchemas dependencies unevaluatedProperties"
    ).split()
)
_NOTHING: Json = {"type": "object", "properties": {}, "additionalProperties": False}


def parameters_of(tool: Tool) -> Json:
    """The schema of the arguments, which are always an object.

    ValueError: the schema admits no object, or nests deeper than `MAX_DEPTH`.
    """
    given = tool.parameters
    if given is True:
        return {"type": "object"}
    if not given:
        return _NOTHING
    if _deep(given):
        raise ValueError(f"the parameters of tool {tool.name!r} nest deeper than {MAX_DEPTH} levels")
    kind = given.get("type", "object")
    if kind != "object" and "object" not in sequence(kind):
        raise ValueError(f"the parameters of tool {tool.name!r} must have type object, got {str(kind)[:100]!r}")
    return {**given, "type": "object"}


@dataclass(frozen=True, slots=True)
class Member:
    """One argument. `schema`: a document of its own."""

    name: str
    schema: Json
    required: bool


def members_of(parameters: Json, what: str) -> list[Member] | None:
    """The arguments in the order of the schema; None where any object will do. Others than those named are left out.

    ValueError: the schema relates arguments to each other, so that they cannot be written one by one; names `what`.
    """
    top = resolved(parameters, parameters)
    strange = next((key for key in (*parameters, *top) if key in _RELATIONS), None)
    if strange:
        raise ValueError(f"{what} uses {strange!r}, which this format of calls cannot enforce")
    properties = mapping(top.get("properties"))
    required = [str(name) for name in sequence(top.get("required"))]
    others = top.get("additionalProperties", True)
    if not properties and not required and others is True:
        return None
    names = [*properties, *(name for name in required if name not in properties)]
    return [Member(name, _document(properties.get(name, others), parameters), name in required) for name in names]


def forms_of(schema: Json, what: str) -> list[Json]:
    """The alternatives that a schema allows, each with at most one type and no `anyOf`.

    ValueError: it combines schemas in a way that has no such list; names `what`.
    """
    forms: list[Json] = []
    unseen: list[object] = [schema]
    for _ in range(_LOOKS):
        if not unseen:
            return forms
        look = resolved(unseen.pop(0), schema)
        choices = sequence(look.get("anyOf")) or sequence(look.get("oneOf"))
        parts = sequence(look.get("allOf"))
        kinds = look.get("type")
        if choices and not parts:
            unseen += choices
        elif len(parts) == 1:
            unseen += parts
        elif sequence(kinds) and "enum" not in look and "const" not in look:
            unseen += [{**look, "type": kind} for kind in sequence(kinds)]
        elif parts or "not" in look or "if" in look:
            raise ValueError(f"{what} combines schemas in a way that this format of calls cannot enforce")
        else:
            forms.append(_document(look, schema))
    raise ValueError(f"{what} has too many alternatives for this format of calls")


def property_of(parameters: Json | bool | None, name: str) -> object:
    """The schema of one argument; None where nothing is said of it."""
    if not isinstance(parameters, Mapping):
        return None
    top = resolved(parameters, parameters)
    return mapping(top.get("properties")).get(name, top.get("additionalProperties"))


def kinds_of(schema: object, root: Json | bool | None) -> frozenset[str]:
    """The JSON types that the schema speaks of, among them those of its enum; empty where it speaks of none."""
    kinds: set[str] = set()
    open_schemas = [schema]
    for _ in range(_LOOKS):
        if not open_schemas:
            break
        look = resolved(open_schemas.pop(), root)
        named = look.get("type")
        kinds.update(str(kind) for kind in sequence(named) or ([named] if named else ()))
        if not named:
            kinds.update(_TYPES.get(type(value), "object") for value in values_of(look))
            for key in ("anyOf", "oneOf", "allOf"):
                open_schemas += sequence(look.get(key))
    return frozenset(kinds)


def values_of(schema: Json) -> list[object]:
    """The values that the schema lists; none where it lists none."""
    return [schema["const"]] if "const" in schema else sequence(schema.get("enum"))


def bound_of(schema: Json, key: str) -> int | None:
    """A limit such as `maxLength`. ValueError: it is no count."""
    bound = schema.get(key)
    if bound is None or (isinstance(bound, int) and not isinstance(bound, bool) and bound >= 0):
        return bound
    raise ValueError(f"{key} must be a count, got {str(bound)[:100]!r}")


def resolved(schema: object, root: object) -> Json:
    """The schema that a chain of `$ref` inside `root` leads to; {} for none."""
    schema = mapping(schema)
    for _ in range(_LOOKS):
        target = schema.get("$ref")
        if not isinstance(target, str) or not target.startswith("#"):
            break
        found: object = root
        for step in target[1:].split("/")[1:]:
            found = mapping(found).get(step.replace("~1", "/").replace("~0", "~"))
        schema = mapping(found)
    return schema


def _document(schema: object, root: Json) -> Json:
    if schema is False:
        return {"not": {}}
    return {**{key: root[key] for key in _DEFINITIONS if key in root}, **mapping(schema)}


def mapping(value: object) -> Json:
    """`value` where it is an object, or an empty one."""
    return cast(Json, value) if isinstance(value, Mapping) else {}


def sequence(value: object) -> list[object]:
    """`value` where it is an array, or an empty one."""
    return cast(list[object], value) if isinstance(value, list) else []


def _deep(schema: object) -> bool:
    level = [schema]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [inner for outer in level for inner in (*mapping(outer).values(), *sequence(outer))]
    return bool(level)
