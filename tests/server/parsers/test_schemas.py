"""What is read from a tool's schema for formats that write arguments one by one."""

import pytest

from server.parsers.registry import Tool
from server.parsers.schemas import bound_of, forms_of, kinds_of, members_of, parameters_of, property_of

ROOT = {
    "$ref": "#/$defs/all",
    "$defs": {
        "all": {"properties": {"a": {"$ref": "#/$defs/a~1b"}, "l": {"$ref": "#/$defs/loop"}}, "required": ["a"]},
        "a/b": {"anyOf": [{"type": "integer"}, {"type": ["null", "string"]}]},
        "loop": {"$ref": "#/$defs/loop"},
    },
}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": [1, "a", None, True, 1.5, {}, []]}, {*"integer string null boolean number object array".split()}),
        ({"const": 1}, {"integer"}),
        ({"$ref": "#/$defs/a~1b"}, {"integer", "null", "string"}),
        ({"allOf": [{"oneOf": [{"type": "array"}]}]}, {"array"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "https://example.org/x"}, set()),
        ({}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_kinds(schema: object, kinds: set[str]):
    """The types that a schema speaks of, through references and alternatives, without end in none of them."""
    assert kinds_of(schema, ROOT) == kinds


def test_properties_and_members():
    """They are found behind a reference, each as a document with the definitions."""
    assert property_of(ROOT, "a") == {"$ref": "#/$defs/a~1b"}
    assert property_of(ROOT, "b") is None
    assert property_of(True, "a") is None and property_of(None, "a") is None
    members = members_of(ROOT, "it")
    assert members is not None and [(m.name, m.required) for m in members] == [("a", True), ("l", False)]
    assert members[0].schema["$defs"] == ROOT["$defs"]
    assert [form.get("type") for form in forms_of(members[0].schema, "it")] == ["integer", "null", "string"]
    assert members_of({"type": "object"}, "it") is None
    assert members_of({"additionalProperties": False}, "it") == []


def test_what_parameters_become():
    """An object always; nothing said of arguments means none."""
    assert parameters_of(Tool("t", None, True))["type"] == "object"
    assert parameters_of(Tool("t", None, {"type": ["object", "null"], "title": "x"})) == {
        "type": "object",
        "title": "x",
    }
    for parameters in (None, {}, False):
        assert parameters_of(Tool("t", None, parameters))["additionalProperties"] is False
    with pytest.raises(ValueError, match="must have type object, got 'array'"):
        parameters_of(Tool("t", None, {"type": "array"}))


@pytest.mark.parametrize("bound", ["5}/ x", -1, True, 1.5])
def test_a_limit_is_a_count(bound: object):
    """Anything else is refused, and nothing of it reaches a grammar."""
    assert bound_of({"maxLength": 3}, "maxLength") == 3 and bound_of({}, "maxLength") is None
    with pytest.raises(ValueError, match="maxLength must be a count"):
        bound_of({"maxLength": bound}, "maxLength")
