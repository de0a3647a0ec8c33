"""Closing a schema's objects: those that are silent about other properties, and nothing else."""

from __future__ import annotations

import pytest

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
        ({"allOf": [A, A]}, {"allOf": [A, A]}),
        ({**A, "allOf": [A]}, {**A, "allOf": [A]}),
        ({"const": A, "enum": [A], "default": A}, {"const": A, "enum": [A], "default": A}),
        (
            {"properties": {"properties": {"type": "string"}, "items": A}},
            {"properties": {"properties": {"type": "string"}, "items": SHUT}, "additionalProperties": False},
        ),
    ],
)
def test_which_objects_are_closed(schema: dict[str, object], expected: dict[str, object]) -> None:
    assert closed(schema) == expected
