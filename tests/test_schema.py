"""Closing a schema's objects: those that are silent about other properties, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.schema import closed

A = {"properties": {"a": {}}}
REF = {"$ref": "#/$defs/x"}
SHUT = {"properties": {"a": {}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, SHUT),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": A}, {**A, "additionalProperties": SHUT}),
        ({**A, "patternProperties": {"^x": A}}, {**A, "patternProperties": {"^x": SHUT}}),
        ({"items": A, "prefixItems": [A, True]}, {"items": SHUT, "prefixItems": [SHUT, True]}),
        (
            {"anyOf": [A, {"$ref": "#/$defs/x"}], "$defs": {"x": A}},
            {"anyOf": [SHUT, {"$ref": "#/$defs/x"}], "$defs": {"x": SHUT}},
        ),
        ({"allOf": [A]}, {"allOf": [SHUT]}),
        ({"allOf": [A, A]}, {"allOf": [A, A]}),
        ({**A, "allOf": [A]}, {**A, "allOf": [A]}),
        ({"items": {**A, "anyOf": [A]}, **A}, {"items": {**A, "anyOf": [A]}, **A}),
        ({**A, "$ref": "#/$defs/x", "$defs": {"x": A}}, {**A, "$ref": "#/$defs/x", "$defs": {"x": A}}),
        ({**A, "required": ["a"]}, {**SHUT, "required": ["a"]}),
        ({**A, "required": ["b"]}, {**A, "required": ["b"]}),
        ({**A, "minProperties": 2}, {**A, "minProperties": 2}),
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
        (
            {"properties": {"properties": {"type": "string"}, "items": A}},
            {"properties": {"properties": {"type": "string"}, "items": SHUT}, "additionalProperties": False},
        ),
    ],
)
def test_which_objects_are_closed(schema: dict[str, object], expected: dict[str, object]) -> None:
    assert closed(schema) == expected


KEYS = st.sampled_from(["properties", "required", "allOf", "anyOf", "items", "$defs", "additionalProperties", "a"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_is_no_schema_does_no_harm(schema: dict[str, object]) -> None:
    """Whether it is one is for the compiler to say."""
    assert (
        closed(schema).items()
        >= {key: value for key, value in schema.items() if not isinstance(value, list | dict)}.items()
    )
