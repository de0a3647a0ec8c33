"""Every format's grammar takes calls as models write them and refuses wrong ones."""

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache

import llguidance.hf
import numpy as np
import pytest
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerFast

from jaxserve.tokenizer import Tokenizer
from jaxserve.weights import demo
from server.parsers.events import Arguments, CallEnd, CallStart, Content
from server.parsers.grammar import MOST_CALLS
from server.parsers.registry import TOOL_FORMATS, Tool, tool_format
from tests.server.parsers.reading import ANY, NOW, SEARCH, TOOLS, WEATHER, machine_of, run
from tests.server.parsers.writing import WRITERS, Call

SPECIALS = sorted({special for made in TOOL_FORMATS.values() for special in made.specials})


@cache
def tokenizer(special: bool) -> LLTokenizer:
    """The demo model's; `special`: with every marker as a special token."""
    fast = Tokenizer.load(demo.find())._fast
    assert isinstance(fast, PreTrainedTokenizerFast)
    if special:
        fast.add_special_tokens({"additional_special_tokens": SPECIALS})
    return llguidance.hf.from_tokenizer(fast)


def spell(special: bool) -> Callable[[str], str]:
    """How a marker is written in Lark."""

    def token(text: str) -> str:
        (number,) = tokenizer(True).tokenize_str(text, parse_special=True)
        return f"<[{number}]>"

    return token if special else lambda text: json.dumps(text, ensure_ascii=False)


def takes(name: str, text: str, tools: Sequence[Tool] = TOOLS, *, special: bool = False, **asked: bool) -> bool:
    """Whether the grammar takes the whole text. Everything that it takes, the machine reads without loss."""
    asked = {"required": True, "parallel": True, **asked}
    lark = tool_format(name).grammar(tools, spell=spell(special), **asked)
    grammar = LLMatcher.grammar_from_lark(lark)
    tokens = tokenizer(special)
    assert LLMatcher.validate_grammar(grammar, tokens) == ""
    matcher = LLMatcher(tokens, grammar)
    ids = tokens.tokenize_str(text, parse_special=special)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


FULL: Call = ("get_weather", {"city": "Paris", "days": 3, "unit": "C", "spots": [1, 2.5], "now": True})
GOOD: list[Call] = [
    FULL,
    ("get_weather", {"city": "a } [ {"}),
    ("now", {}),
    ("поиск-web_2", {"ключ": "да нет"}),
    ("anything", {"a": "b"}),
    ("anything", {}),
]
WRONG: list[Call] = [
    ("get_weather", {"days": 3}),
    ("get_weather", {"city": "Paris", "days": "three"}),
    ("get_weather", {"city": "Paris", "unit": "K"}),
    ("get_weather", {"city": "Paris", "other": 1}),
    ("now", {"a": 1}),
    ("поиск-web_2", {}),
    ("unknown", {}),
    ("get_weathe", {"city": "Paris"}),
]
FORMATS = [(*item, special) for item in WRITERS for special in (False, True)]
in_each_format = pytest.mark.parametrize(("name", "write", "special"), FORMATS)
type Write = Callable[[Sequence[Call]], str]


@in_each_format
def test_required_calls(name: str, write: Write, special: bool):
    """Right calls are taken, alone and together; wrong ones, other text and a second call of one are not."""
    for call in GOOD:
        assert takes(name, write([call]), special=special, parallel=False), call
    assert takes(name, write(GOOD), special=special)
    for call in WRONG:
        assert not takes(name, write([call]), special=special), call
    assert not takes(name, write(GOOD[:2]), special=special, parallel=False)
    assert not takes(name, "Sure. " + write(GOOD[:1]), special=special)
    assert not takes(name, write(GOOD[:1]) + " more", special=special)
    for text in ("", "Sure."):
        assert not takes(name, text, special=special)


@in_each_format
def test_named_call(name: str, write: Write, special: bool):
    """With one tool, only it can be called."""
    assert takes(name, write([("now", {})]), [NOW], special=special, parallel=False)
    assert not takes(name, write([("anything", {})]), [NOW], special=special, parallel=False)


def said(name: str, text: str) -> str:
    """Text for the user as the format has it."""
    return f"<|channel|>final<|message|>{text}" if name == "openai" else text


@in_each_format
def test_free_text_with_strict_calls(name: str, write: Write, special: bool):
    """Any text is taken, but a call in it has to be right; arguments of a tool that is not strict are any object."""
    asked = {"required": False, "special": special}
    lax = [*TOOLS[:-1], Tool("lax", None, WEATHER.parameters, False)]
    for text in ("", "Sure.\n", 'It is {"city": 1} [1] <b> ```json', "\n"):
        assert takes(name, said(name, text), **asked), text
    for call in GOOD:
        assert takes(name, write([call]), **asked), call
    assert takes(name, write(GOOD), **asked)
    assert takes(name, write([("lax", {"any": "x"})]), lax, **asked)
    for call in WRONG:
        assert not takes(name, write([call]), **asked), call
    assert not takes(name, write(GOOD[:2]), **asked, parallel=False)
    assert takes(name, write(GOOD[:1]), **asked, parallel=False)


@pytest.mark.parametrize(
    ("name", "write"), [item for item in WRITERS if item[0] in ("hermes", "mistral", "qwen3_coder")]
)
def test_text_around_calls(name: str, write: Write):
    """Where a marker begins a call, free text stands before and after it."""
    for special in (False, True):
        assert takes(name, f"Sure.\n\n{write(GOOD[:1])} done", required=False, special=special)
        assert not takes(name, f"Sure.\n\n{write(WRONG[:1])} done", required=False, special=special)


def test_whitespace_is_bounded():
    """Between the parts of JSON there is a line break with some indentation, or little."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {%s"city": "a"}}\n</tool_call>'
    assert takes("hermes", call % "\n        ") and takes("hermes", call % "") and takes("hermes", call % " ")
    assert not takes("hermes", call % (" " * 20)) and not takes("hermes", call % "\n\n\n")


LIMITED = Tool(
    "limited",
    None,
    {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
            "short": {"type": "string", "minLength": 1, "maxLength": 3},
            "maybe": {"anyOf": [{"$ref": "#/$defs/mode"}, {"type": "null"}]},
            "either": {"type": ["integer", "null"]},
            "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "deep": {"type": "object", "properties": {"m": {"$ref": "#/$defs/mode"}}, "additionalProperties": False},
        },
        "required": [],
        "additionalProperties": False,
        "$defs": {"mode": {"type": "string", "enum": ["on", "off"]}},
    },
    True,
)


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_schemas_with_references_and_limits(name: str, write: Write):
    """Values one by one and as JSON obey patterns, lengths, alternatives and definitions."""
    right = {"code": "AB", "short": "abc", "maybe": "on", "either": None, "text": "x y", "deep": {"m": "off"}}
    assert takes(name, write([("limited", right)]), [LIMITED])
    for key, value in right.items():
        assert takes(name, write([("limited", {key: value})]), [LIMITED]), key
    wrong = [("code", "ABC"), ("code", "a"), ("short", ""), ("short", "abcd"), ("maybe", "x"), ("either", "x")]
    for key, value in [*wrong, ("deep", {"m": "x"})]:
        assert not takes(name, write([("limited", {key: value})]), [LIMITED]), (key, value)


TINY = Tool(
    "tiny",
    None,
    {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 4},
            "e": {"enum": ["a b", "c", 3, None]},
            "n": {"type": ["integer", "null"], "minimum": 0, "maximum": 50},
            "l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
            "m": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
        },
        "required": ["s", "l"],
        "additionalProperties": False,
    },
    True,
)


def wander(matcher: LLMatcher, tokens: LLTokenizer, text: bytes, chance: random.Random) -> bytes | None:
    """A text that the grammar goes on with after `text`, of any tokens; None where it finds no end."""
    assert matcher.consume_tokens(tokens.tokenize_bytes(text))
    for _ in range(200):
        if matcher.is_accepting() and (matcher.is_stopped() or chance.random() < 0.5):
            return text
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = [int(token) for token in np.nonzero(bits)[0] if token != tokens.eos_token]
        token = chance.choice(allowed if chance.random() < 0.6 else allowed[:100])
        assert matcher.consume_token(token)
        text += tokens.decode_bytes([token])
    return None


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", sorted({name for name, _ in WRITERS}))
def test_whatever_the_grammar_allows_is_read_as_right_calls(name: str, parallel: bool):
    """Texts that a model without sense could write: whole calls, nothing else, with arguments of the schema."""
    tokens = tokenizer(False)
    lark = tool_format(name).grammar([TINY, NOW], required=True, parallel=parallel, spell=spell(False))
    chance = random.Random(f"{name} {parallel}")
    for _ in range(8):
        matcher = LLMatcher(tokens, LLMatcher.grammar_from_lark(lark))
        text = wander(matcher, tokens, b"<|channel|>commentary to" if name == "openai" else b"", chance)
        try:
            whole = text.decode() if text is not None else None
        except UnicodeDecodeError:
            continue
        if whole is None:
            continue
        events = run(machine_of(name, tools=(TINY, NOW)), [whole])
        names = [event.name for event in events if isinstance(event, CallStart)]
        given = [
            "".join(e.text for e in events if isinstance(e, Arguments) and e.index == i) for i in range(len(names))
        ]
        assert names and (parallel or len(names) == 1), whole
        assert len([event for event in events if isinstance(event, CallEnd)]) == len(names), whole
        assert not [event for event in events if isinstance(event, Content)], whole
        for called, arguments in zip(names, given, strict=True):
            Draft202012Validator(TINY.parameters if called == "tiny" else {"maxProperties": 0}).validate(
                json.loads(arguments)
            )


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"type": "string"}, "must have type object"),
        ({"type": "object", "properties": {"a": json.loads('{"items":' * 200 + "{}" + "}" * 200)}}, "nest deeper"),
    ],
)
def test_a_schema_that_no_call_can_have(name: str, parameters: dict[str, object], message: str):
    """It is refused with the tool's name."""
    with pytest.raises(ValueError, match=f"tool 'bad'.*{message}"):
        tool_format(name).grammar(
            [Tool("bad", None, parameters, True)], required=True, parallel=True, spell=spell(False)
        )


@pytest.mark.parametrize("name", ["qwen3_coder", "pythonic"])
def test_a_schema_that_cannot_be_written_one_by_one(name: str):
    """A keyword that relates arguments to each other is refused by name."""
    bad = Tool("bad", None, {"properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, True)
    with pytest.raises(ValueError, match=re.escape("'bad' uses 'dependentRequired'")):
        tool_format(name).grammar([bad], required=True, parallel=True, spell=spell(False))


def test_tools_without_schema():
    """No schema means no arguments, True any object."""
    for parameters in (None, {}, False):
        tool = Tool("t", None, parameters, True)
        assert takes("json", '{"name": "t", "arguments": {}}', [tool])
        assert not takes("json", '{"name": "t", "arguments": {"a": 1}}', [tool])
    assert takes("json", '{"name": "anything", "arguments": {"a": [{}]}}', [ANY])
    assert takes("json", '{"name": "поиск-web_2", "arguments": {"ключ": ""}}', [SEARCH])


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_the_number_of_calls_is_bounded(name: str, write: Write):
    """Or a model that repeats itself would end by its length, in the middle of a call."""
    if not takes(name, write([("now", {})] * 2)):
        pytest.skip("this way of writing knows one call only")
    assert takes(name, write([("now", {})] * MOST_CALLS))
    assert not takes(name, write([("now", {})] * (MOST_CALLS + 1)))


@pytest.mark.parametrize(("name", "write"), WRITERS)
def test_arguments_that_the_schema_does_not_name_are_not_made_up(name: str, write: Write):
    tool = Tool("t", None, {"properties": {"a": {"type": "string"}, "b": {"properties": {"c": {}}}}, "required": ["a"]})
    assert takes(name, write([("t", {"a": "x"})]), [tool])
    assert not takes(name, write([("t", {"a": "x", "z": "y"})]), [tool])


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder"])
def test_definitions_are_not_repeated_without_end(name: str):
    """Every argument brings the definitions that it may refer to: a small request must not become gigabytes."""
    some = {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}}
    parameters = {
        "type": "object",
        "properties": {f"p{i}": some for i in range(2000)},
        "$defs": {f"d{i}": {"type": "string", "description": "x" * 100} for i in range(300)},
    }
    with pytest.raises(ValueError, match="make them shorter"):
        tool_format(name).grammar([Tool("f", None, parameters, True)], required=True, parallel=True, spell=spell(False))
