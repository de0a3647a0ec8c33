"""The judgement of answers to the JSON-Schema-Test-Suite."""

import json

import pytest

from benchmarks.schema_suite import begins_json, judge, judge_refusal

DOCUMENT = r'{"a\"b\u00e9\\": [-12.5e+10, true, false, null, "", [], {}], "c": {"d": 0}, "e": "\ud83d\ude00"}'


def test_every_prefix_of_a_document_begins_json():
    json.loads(DOCUMENT)
    assert [end for end in range(len(DOCUMENT) + 1) if not begins_json(DOCUMENT[:end])] == []


@pytest.mark.parametrize(
    "text", ["[1,,", '{"a",', "[1 2", "trua", "]", '{"a": 1]', "01", '"\\x', '"\\u12g', "{1", "NaN", "x", '"\n', "[}"]
)
def test_what_no_document_begins_with(text: str):
    assert not begins_json(text)


@pytest.mark.parametrize(
    ("schema", "answer", "finish_reason", "outcome"),
    [
        ({"type": "integer"}, "7", "stop", "valid"),
        ({"type": "integer"}, "7", "length", "valid"),
        ({"type": "integer"}, '"7"', "stop", "wrong"),
        ({"minimum": 10}, "1", "length", "cut"),
        ({"type": "array"}, "[1, ", "length", "cut"),
        ({"type": "array"}, "[1, ", "stop", "wrong"),
        ({"type": "array"}, "[1, x", "length", "wrong"),
        ({}, "NaN", "stop", "wrong"),
        (False, "null", "stop", "wrong"),
        ({"pattern": "\\p{Letter}"}, '"a"', "stop", "unjudged"),
        ({"$ref": "http://localhost:1234/integer.json"}, "1", "length", "wrong"),
    ],
)
def test_answers(schema: dict[str, object] | bool, answer: str, finish_reason: str, outcome: str):
    assert judge(schema, answer, finish_reason)[0] == outcome


@pytest.mark.parametrize(
    ("status", "message", "outcome"),
    [
        (400, "structured_outputs.json: uniqueItems cannot be enforced", "refused"),
        (400, "unsupported: a set of values", "refused"),
        (400, "the schema is too bad", "wrong"),
        (400, "uniqueItemsOf what?", "wrong"),
        (500, "uniqueItems: the server failed", "wrong"),
    ],
)
def test_refusals(status: int, message: str, outcome: str):
    body = json.dumps({"error": {"message": message}})
    assert judge_refusal({"items": {"uniqueItems": True}}, status, body)[0] == outcome


def test_a_refusal_without_a_message_is_wrong():
    assert judge_refusal({"type": "string"}, 400, "type is unsupported")[0] == "wrong"
