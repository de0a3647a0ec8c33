"""What a request may ask of its answer's shape: which texts it lets through, and what is refused with which words."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxserve.grammar.compile import KEPT, Compiler
from jaxserve.grammar.constraint import Constraint
from jaxserve.grammar.source import MAX_DEPTH, MAX_RULES, MAX_TEXT
from jaxserve.types import EngineDead, InvalidRequest
from jaxserve.types import StructuredOutputsParams as Asked

EOS = 256
CITY: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    found = Compiler("byte", 258, (EOS,))
    yield found
    found.close()


def tree(kind: dict[str, object]) -> Asked:
    return Asked(structural_tag=json.dumps({"type": "structural_tag", "format": kind}))


ANYTHING = {"type": "any_text"}
INTEGER: dict[str, object] = {"type": "json_schema", "json_schema": {"type": "integer"}}
TEXTS: list[tuple[str, Asked, list[str], list[str]]] = [
    ("schema", Asked(json=CITY), ['{"city":"a"}', '{ "city": "a",\n  "n": 1}'], ["{}", "[]", '{"city":"a","x":1}']),
    ("schema as text", Asked(json=json.dumps(CITY)), ['{"city":"ключ"}'], ['{"n":1}']),
    ("open", Asked(json=CITY, disable_additional_properties=False), ['{"city":"a"}', '{"city":"a","x":[]}'], ["{}"]),
    ("left open", Asked(json=CITY | {"additionalProperties": True}), ['{"city":"a","x":[]}'], ["{}"]),
    ("no blanks", Asked(json=CITY, disable_any_whitespace=True), ['{"city":"a","n":1}'], ['{"city": "a"}']),
    ("own blanks", Asked(json=CITY, whitespace_pattern="[ ]{3}"), ['{   "city"   :   "a"   }'], ['{"city": "a"}']),
    ("blanks end", Asked(json=CITY), [], ['{"city":' + " " * 9 + '"a"}', "{" + "\n" * 5 + '"city":"a"}']),
    ("any schema", Asked(json=True), ["1", '{"a":[null]}'], ["nul", "{'a':1}"]),
    ("keys", Asked(json={"properties": {'a"b': {"const": "🙂"}}, "required": ['a"b'], "type": "object"}),
     ['{"a\\"b":"🙂"}'], ['{"a\\"b":"🙃"}']),
    ("object", Asked(json_object=True), ["{}", '{"a":{"b":1.5e3}}'], ["[]", "1"]),
    ("regex", Asked(regex=r"\d{3}-[a-z/]+"), ["123-a/b"], ["12-a", "123-"]),
    ("choice", Asked(choice=["yes", 'n"o', "я"]), ["yes", 'n"o', "я"], ["no", "y", ""]),
    ("lark", Asked(grammar='start: "a" n\nn: /[0-9]+/'), ["a1", "a12"], ["a", "b1"]),
    ("json in lark", Asked(grammar='start: "x" %json {"type":"boolean"}'), ["xtrue"], ["x1"]),
    ("gbnf", Asked(grammar='root ::= "a" num\nnum ::= [0-9]+'), ["a1"], ["a"]),
    ("tags", Asked(structural_tag=json.dumps(TAG)), ["", "free", "so <f>1</f> and <f>2</f>."], ["<f>x</f>"]),
    ("tree", tree({"type": "sequence", "elements": [{"type": "const_string", "value": "n"}, INTEGER]}), ["n1"], ["1"]),
    ("or", tree({"type": "or", "elements": [INTEGER, {"type": "regex", "pattern": "a/b+"}]}), ["1", "a/b"], ["a"]),
    ("tag", tree({"type": "tag", "begin": "<", "content": INTEGER, "end": [">", "]"]}), ["<1>", "<1]"], ["<1"]),
    ("triggered", tree({"type": "triggered_tags", "triggers": ["<"], "tags": [
        {"begin": "<", "content": INTEGER, "end": ">"}, {"begin": "<b:", "content": ANYTHING, "end": ";"}]}),
     ["a <1> b", "<b:x;", "<b:x; y <1>"], ["<x>"]),
    ("separated", tree({"type": "tags_with_separator", "separator": ",", "at_least_one": True, "tags": [
        {"begin": "<", "content": INTEGER, "end": ">"}]}), ["<1>", "<1>,<2>"], ["", "<1><2>"]),
]  # fmt: skip


def follows(compiler: Compiler, asked: Asked, text: str) -> bool:
    matcher = compiler.submit(asked).result().matcher()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(("asked", "right", "wrong"), [t[1:] for t in TEXTS], ids=[t[0] for t in TEXTS])
def test_which_texts_may_be_said(compiler: Compiler, asked: Asked, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not follows(compiler, asked, text)] == []
    assert [text for text in wrong if follows(compiler, asked, text)] == []


def refs(count: int) -> dict[str, object]:
    steps = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{count}": {"type": "string"}}}


def nested(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


REFUSED: list[tuple[str, Asked, str]] = [
    ("keyword", Asked(json={"not": {"type": "string"}}), "not"),
    ("unique", Asked(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
    ("one of", Asked(json={"oneOf": [{"type": "string"}, {"minLength": 2}]}), "oneOf"),
    ("remote", Asked(json={"$ref": "http://somewhere/else"}), r"\$ref"),
    ("nowhere", Asked(json={"$ref": "#/$defs/x"}), r"\$ref"),
    ("look-around", Asked(json={"pattern": "(?=a)"}), "pattern"),
    ("format", Asked(json={"format": "wild"}), "format"),
    ("type", Asked(json={"type": "wild"}), "type"),
    ("nothing", Asked(json=False), "false"),
    ("nothing fits", Asked(json={"type": "string", "const": 1}), "Unsatisfiable"),
    ("no json", Asked(json="{"), "not a JSON Schema"),
    ("no schema", Asked(json="[1]"), "must be a JSON Schema"),
    ("no regex", Asked(regex="(a"), "regex"),
    ("no grammar", Asked(grammar="start: ("), "grammar"),
    ("no gbnf", Asked(grammar="root ::= ("), "grammar"),
    ("no start", Asked(grammar='other: "a"'), "start"),
    ("no tag", Asked(structural_tag="{}"), "structural_tag"),
    ("no trigger", Asked(structural_tag=json.dumps(TAG | {"triggers": ["<g"]})), "triggers"),
    ("strange tag", tree({"type": "wild"}), "wild"),
    ("large", Asked(json={"const": "x" * MAX_TEXT}), "characters"),
    ("deep", Asked(json=nested(MAX_DEPTH + 1)), "nests deeper"),
    ("very deep", Asked(json=nested(100_000)), "nests|not a JSON"),
    ("deep text", Asked(json='{"items":' * 50_000 + "{}" + "}" * 50_000), "nests|not a JSON"),
    ("deep grammar", Asked(grammar="start: " + "(" * 50_000 + '"a"' + ")" * 50_000), "nested"),
    ("deep gbnf", Asked(grammar="root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000), "nests"),
    ("deep regex", Asked(regex="(" * 50_000 + "a" + ")" * 50_000), "regex"),
    ("chain of references", Asked(json=refs(MAX_RULES + 1)), "more than"),
    ("chain of rules", Asked(grammar="\n".join(f"r{i}: r{i + 1}" for i in range(20_000))), "more than"),
]


@pytest.mark.parametrize(("asked", "words"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_what_is_refused_and_how(compiler: Compiler, asked: Asked, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as error:
        compiler.submit(asked).result()
    assert error.value.param == "structured_outputs"
    assert len(str(error.value)) < 3000


def test_the_longest_chains_that_are_taken_compile(compiler: Compiler) -> None:
    """The compiler recurses over them: the threads that compile have the stack for it."""
    rules = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(MAX_RULES - 2)) + f'\nr{MAX_RULES - 2}: "a"'
    assert follows(compiler, Asked(grammar=rules), "a")
    assert follows(compiler, Asked(json=refs(MAX_RULES - 1)), '"a"')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"choice": []}, "choice must not be empty"),
        ({"choice": [1]}, "choice must hold strings"),
        ({"regex": 1}, "regex must be a string"),
        ({"json": [1]}, "json must be a JSON Schema"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be true or false"),
    ],
)
def test_parameters_that_are_no_shape(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Asked(**fields)  # type: ignore[arg-type]


def test_what_is_asked_often_is_compiled_once(compiler: Compiler) -> None:
    first = compiler.submit(Asked(json=CITY)).result()
    assert compiler.submit(Asked(json=json.dumps(CITY))).result() is first
    for i in range(KEPT):
        compiler.submit(Asked(choice=[f"x{i}"])).result()
    assert compiler.submit(Asked(json=CITY)).result() is not first


def test_settings_hold_for_every_request() -> None:
    own = Compiler("byte", 258, (EOS,), disable_any_whitespace=True, disable_additional_properties=False)
    assert not follows(own, Asked(json=CITY), '{"city": "a"}')
    assert follows(own, Asked(json=CITY), '{"city":"a","x":1}')
    assert not follows(own, Asked(json=CITY, disable_additional_properties=True), '{"city":"a","x":1}')
    own.close()


def test_settings_hold_for_the_schemas_of_tags() -> None:
    tag = {"type": "structural_tag", "structures": [{"begin": "<", "schema": CITY, "end": ">"}], "triggers": ["<"]}
    asked = Asked(structural_tag=json.dumps(tag))
    strict = Compiler("byte", 258, (EOS,), disable_any_whitespace=True, disable_additional_properties=True)
    assert follows(strict, asked, '<{"city":"a"}>')
    assert not follows(strict, asked, '<{"city":"a","x":1}>')
    assert not follows(strict, asked, '<{"city": "a"}>')
    deep = '{"items":' * 600 + "{}" + "}" * 600
    text = f'{{"format": {{"type": "json_schema", "json_schema": {deep}}}}}'
    with pytest.raises(InvalidRequest, match="structural_tag"):
        strict.submit(Asked(structural_tag=text)).result()
    strict.close()


def test_every_end_of_the_model_may_follow_a_whole_text_and_nothing_else() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.add_special_tokens(["<one>", "<two>", "</s>"])
    a, ends = words.token_to_id("a"), (257, 256)
    assert a is not None
    found = Compiler(words.to_str(), 300, ends)
    grammar = found.submit(Asked(regex="a{1,3}")).result()
    found.close()
    for end in ends:
        c = Constraint(grammar)
        assert [_follow(c), c.accept(a), _follow(c)] == [[a], True, [a, 256, 257]]
        assert c.accept(end)
        assert _follow(c) == [256, 257]


def _follow(constraint: Constraint) -> list[int]:
    masks = np.full((1, 10), -1, np.int32)
    constraint.fill(masks, 0)
    return [t for t in range(320) if int(masks.view(np.uint32)[0, t // 32]) >> t % 32 & 1]


def test_a_model_without_an_end_has_no_structured_outputs(caplog: pytest.LogCaptureFixture) -> None:
    """A text that is whole could not end."""
    endless = Compiler("byte", 258, ())
    with pytest.raises(InvalidRequest, match="structured outputs"):
        endless.submit(Asked(choice=["a"])).result()
    assert "no token ends" in caplog.text
    endless.close()


def test_a_tokenizer_that_cannot_be_read_costs_only_structured_outputs(caplog: pytest.LogCaptureFixture) -> None:
    blind = Compiler('{"version": "1.0"}', 258, (EOS,))
    with pytest.raises(InvalidRequest, match="tokenizer"):
        blind.submit(Asked(choice=["a"])).result()
    assert "structured outputs" in caplog.text
    blind.close()
    with pytest.raises(EngineDead):
        blind.submit(Asked(choice=["a"]))


def test_other_threads_keep_their_stacks() -> None:
    before = threading.stack_size()
    Compiler("byte", 258, (EOS,)).close()
    assert threading.stack_size() == before
