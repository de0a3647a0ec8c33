"""Tools in chat completions over the fake engine, whose answers are scripted."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace

import httpx
import msgspec
import pytest

from jaxserve.config import ServerConfig
from jaxserve.types import CompletionOutput, InvalidRequest, StructuredOutputsParams
from server.flags import add_flags, read_flags
from server.openai import chat_job
from server.openai.dialect import Dialect, check_parsers, dialect_of, spelling
from server.openai.messages import short_id
from server.openai.speaking import Manner, Speaker, Without
from server.openai.templates import read
from server.openai.tools import tool_use
from server.parsers.registry import tool_format
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import BOS, EOS, USER, FakeEngine, FakeTokenizer
from tests.server.test_completions import stream
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
ASK = [{"role": "user", "content": "weather in Rome?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
HERMES = "{{ messages }}{{ tools }}<tool_call>"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=4096)
    engine.tokenizer.template = HERMES
    return engine


async def ask(client: httpx.AsyncClient, **fields: object) -> dict:
    body = {"model": "toy", "messages": ASK, "temperature": 0, "tools": TOOLS, **fields}
    response = await client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def assembled(chunks: list[dict], index: int = 0) -> tuple[dict, str]:
    """What a client makes of a stream: the message, and the one finish_reason."""
    message: dict = {"role": None, "content": "", "tool_calls": []}
    ends: list[str] = []
    for choice in (c for chunk in chunks for c in chunk["choices"] if c["index"] == index):
        delta = choice["delta"]
        if "role" in delta:
            assert message["role"] is None, "a second role"
            message["role"] = delta["role"]
        message["content"] += delta.get("content", "")
        if "reasoning" in delta:
            message["reasoning"] = message.get("reasoning", "") + delta["reasoning"]
        for piece in delta.get("tool_calls", ()):
            calls = message["tool_calls"]
            if piece["index"] == len(calls):
                assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
                calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
            else:
                assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        if choice["finish_reason"] is not None:
            ends.append(choice["finish_reason"])
    assert len(ends) == 1
    return message, ends[0]


def comparable(message: dict) -> dict:
    """Without random ids; an absent field is an empty one."""
    calls = [{**call, "id": None} for call in message.get("tool_calls", ())]
    return {**message, "content": message["content"] or "", "tool_calls": calls, "refusal": None}


SCRIPTS = {
    "one call": (CALL, [("get_weather", '{"city": "Rome"}')], "", "tool_calls"),
    "text and a call": (f"Let me see.\n{CALL}", [("get_weather", '{"city": "Rome"}')], "Let me see.", "tool_calls"),
    "two calls": (f"{CALL}\n{CALL_NOW}", [("get_weather", '{"city": "Rome"}'), ("now", "{}")], "", "tool_calls"),
    "no call": ("It is <tool> time < 3.", [], "It is <tool> time < 3.", "stop"),
    "characters of several bytes": ("é 👩 ☃", [], "é 👩 ☃", "stop"),
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.replace(" ", "-"))
async def test_a_stream_says_what_the_whole_answer_says(client, engine: FakeEngine, script: str) -> None:
    engine.script, calls, content, finish = SCRIPTS[script]
    choice = (await ask(client))["choices"][0]
    said = choice["message"]
    found = [(c["function"]["name"], c["function"]["arguments"]) for c in said.get("tool_calls", ())]
    assert (found, said["content"] or "", choice["finish_reason"]) == (calls, content, finish)
    assert (said["content"] is None) == (bool(calls) and not content)
    assert ("tool_calls" in said) == bool(calls)
    message, end = assembled(await stream(client, PATH, messages=ASK, tools=TOOLS))
    assert (comparable(message), end) == (comparable(said), finish)


ROME = '{"city": "Rome"}'
FORMATS = {
    "deepseek_v31": f"<|tool▁calls▁begin|><|tool▁call▁begin|>get_weather<|tool▁sep|>{ROME}"
    "<|tool▁call▁end|><|tool▁calls▁end|>".replace("|", "\uff5c"),
    "hermes": CALL,
    "json": f'{{"name": "get_weather", "arguments": {ROME}}}',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ROME}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ROME}}}]',
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>",
    "pythonic": '[get_weather(city="Rome")]',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n</function></tool_call>",
}


@pytest.mark.parametrize("name", FORMATS)
async def test_every_format_is_told_in_the_same_way(engine: FakeEngine, name: str) -> None:
    engine.script = FORMATS[name]
    async with client_of(make_service(engine, tool_call_parser=name)) as client:
        for limit in (400, len(engine.script) // 2):
            choice = (await ask(client, max_tokens=limit))["choices"][0]
            message, end = assembled(await stream(client, PATH, messages=ASK, tools=TOOLS, max_tokens=limit))
            assert (comparable(message), end) == (comparable(choice["message"]), choice["finish_reason"])
            assert choice["finish_reason"] == ("tool_calls" if limit == 400 else "length")
            if limit == 400:
                [call] = choice["message"]["tool_calls"]
                assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
                    "get_weather",
                    {"city": "Rome"},
                )
                assert choice["message"]["content"] is None


async def test_an_answer_of_the_callers_shape_holds_no_calls(client, engine: FakeEngine, monkeypatch) -> None:
    shape = StructuredOutputsParams(json_object=True)
    monkeypatch.setattr(chat_job, "wanted", lambda _: shape)
    engine.script = CALL
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    for tools in (TOOLS, [strict]):
        choice = (await ask(client, tools=tools))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
        assert engine.params[-1].structured_outputs == shape
    for demand in ("required", NAMED):
        body = {"messages": ASK, "tools": TOOLS, "tool_choice": demand}
        assert error_of(await client.post(PATH, json=body), 400)["param"] == "tool_choice"


async def test_ids_are_distinct_and_have_openais_form(client, engine: FakeEngine) -> None:
    engine.script = f"{CALL}{CALL_NOW}"
    calls = [c for choice in (await ask(client, n=2))["choices"] for c in choice["message"]["tool_calls"]]
    ids = {call["id"] for call in calls}
    assert len(ids) == 4
    assert all(id.startswith("call_") and len(id) == 29 for id in ids)
    assert {call["type"] for call in calls} == {"function"}


async def test_every_choice_of_a_stream_has_its_own_calls(client, engine: FakeEngine) -> None:
    engine.script = f"{CALL}{CALL_NOW}"
    chunks = await stream(client, PATH, messages=ASK, tools=TOOLS, n=2)
    first, second = (assembled(chunks, index)[0] for index in (0, 1))
    assert comparable(first) == comparable(second)
    assert len({call["id"] for call in first["tool_calls"] + second["tool_calls"]}) == 4


@pytest.mark.parametrize("limit", range(1, 70, 7))
async def test_a_cut_call_is_cut_by_length(client, engine: FakeEngine, limit: int) -> None:
    """Whole and streamed alike, and nothing that was said is lost."""
    engine.script = CALL
    choice = (await ask(client, max_tokens=limit))["choices"][0]
    assert choice["finish_reason"] == "length"
    message, end = assembled(await stream(client, PATH, messages=ASK, tools=TOOLS, max_tokens=limit))
    assert (comparable(message), end) == (comparable(choice["message"]), "length")


async def test_a_stop_string_in_a_later_call_cuts_it(client, engine: FakeEngine) -> None:
    """An answer that ends in the middle of a call must not be taken for one that is ready to be carried out."""
    engine.script = f"{CALL}\n{CALL_NOW}"
    choice = (await ask(client, stop='": {}'))["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 2
    assert choice["finish_reason"] == "stop"
    assert (await ask(client, stop='": {}', parallel_tool_calls=False))["choices"][0]["finish_reason"] == "tool_calls"


async def test_one_call_where_parallel_calls_are_off(client, engine: FakeEngine) -> None:
    engine.script = f"{CALL}{CALL_NOW}{CALL}"
    choice = (await ask(client, parallel_tool_calls=False))["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
    assert choice["finish_reason"] == "tool_calls"
    message, _ = assembled(await stream(client, PATH, messages=ASK, tools=TOOLS, parallel_tool_calls=False))
    assert comparable(message) == comparable(choice["message"])


async def test_none_takes_all_text_as_it_is(client, engine: FakeEngine) -> None:
    engine.script = CALL
    choice = (await ask(client, tool_choice="none"))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")
    assert "tool_calls" not in choice["message"]


async def test_tools_stand_in_the_prompt_also_where_none_may_be_called(client) -> None:
    sizes = [
        (await ask(client, max_tokens=1, **fields))["usage"]["prompt_tokens"]
        for fields in ({"tools": None}, {"tools": [NOW], "tool_choice": "none"}, {"tools": [NOW]}, {})
    ]
    assert sizes[0] < sizes[1] == sizes[2] < sizes[3]


async def test_only_what_was_promised_is_enforced(client, engine: FakeEngine) -> None:
    engine.script = CALL
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    must = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    cases: list[tuple[dict, dict | None]] = [
        ({}, None),
        ({"tool_choice": "none"}, None),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, None),
        ({"tools": [strict, NOW]}, {"required": False, "parallel": True, "names": ["get_weather", "now"]}),
        ({"tools": [strict], "tool_choice": "none"}, None),
        ({"tool_choice": "required"}, {"required": True, "parallel": True, "names": ["get_weather", "now"]}),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            {"required": True, "parallel": False, "names": ["get_weather", "now"]},
        ),
        ({"tool_choice": NAMED}, {"required": True, "parallel": False, "names": ["get_weather"]}),
        ({"tool_choice": allowed}, {"required": False, "parallel": True, "names": ["get_weather"]}),
        ({"tool_choice": must}, {"required": True, "parallel": True, "names": ["get_weather"]}),
    ]
    tokenizer = engine.tokenizer
    for fields, wanted in cases:
        await ask(client, **fields)
        found = engine.params[-1].structured_outputs
        if wanted is None:
            assert found is None, fields
            continue
        use = tool_use(fields.get("tools", TOOLS), fields.get("tool_choice"), fields.get("parallel_tool_calls"))
        assert [tool.name for tool in use.callable] == wanted.pop("names"), fields
        grammar = tool_format("hermes").grammar(use.callable, spell=lambda t: spelling(t, tokenizer), **wanted)
        assert found is not None and found.grammar == grammar, fields


async def test_a_named_call_is_a_plain_stop(client, engine: FakeEngine) -> None:
    engine.script = CALL
    for choice, finish in ((NAMED, "stop"), ("required", "tool_calls")):
        answer = await ask(client, tool_choice=choice)
        assert answer["choices"][0]["finish_reason"] == finish
        assert answer["choices"][0]["message"]["content"] is None


async def test_a_grammar_that_the_engine_refuses_is_about_the_tools(client, engine: FakeEngine, monkeypatch) -> None:
    async def refuse(*_: object, **__: object):
        raise InvalidRequest("structured_outputs.grammar: no", "structured_outputs")
        yield

    monkeypatch.setattr(engine, "generate", refuse)
    body = {"messages": ASK, "tools": TOOLS, "tool_choice": "required"}
    assert error_of(await client.post(PATH, json=body), 400)["param"] == "tools"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [{"messages": ASK}, {"prompt": "x"}], ids=["chat", "completion"])
async def test_a_shape_that_the_engine_refuses_is_about_the_field_that_asked(
    client, engine: FakeEngine, monkeypatch, prompt: dict, stream: bool
) -> None:
    async def refuse(*_args: object, **_named: object):
        raise InvalidRequest("structured_outputs.json is not a JSON Schema", "structured_outputs")
        yield

    monkeypatch.setattr(engine, "generate", refuse)
    path = PATH if "messages" in prompt else "/v1/completions"
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}}
    for field, value in (("response_format", schema), ("structured_outputs", {"json": {"type": 1}})):
        error = error_of(await client.post(path, json=prompt | {field: value, "stream": stream}), 400)
        assert error["param"] == field and field in error["message"]


async def test_each_tokens_data_arrives_once(client, engine: FakeEngine) -> None:
    engine.script = f"Well.\n{CALL}"
    told = {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = (await ask(client, **told))["choices"][0]
    chunks = [c["choices"][0] for c in await stream(client, PATH, messages=ASK, tools=TOOLS, **told)]
    assert [t for c in chunks for t in c.get("token_ids", ())] == whole["token_ids"]
    assert [t for c in chunks if c["logprobs"] for t in c["logprobs"]["content"]] == whole["logprobs"]["content"]
    assert len(whole["logprobs"]["content"]) == len(whole["token_ids"]) == len(engine.script) + 1


F = {"type": "function"}
REFUSED: list[tuple[dict, str]] = [
    ({"tools": []}, "tools"),
    ({"tools": None, "tool_choice": "auto"}, "tool_choice"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    ({"tools": None, "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "tool_choice"),
    ({"tool_choice": {"function": {"name": "now"}}}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": [NAMED]}}}, "tool_choice"),
    ({"tools": [NOW] * 2}, "tools"),
    ({"tools": [{**F, "function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tools": [F]}, "tools"),
    ({"tools": [{**F, "function": {}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": ""}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": "x" * 65}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": "f", "parameters": [1]}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": "f", "strict": "yes"}}]}, "tools"),
    ({"tools": [{**F, "function": {"name": "f", "description": "x" * (1 << 20)}}]}, "tools"),
    ({"tools": ["f"]}, "tools"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda v: str(v)[:60])
async def test_what_is_refused(client, fields: dict, param: str) -> None:
    body = {"messages": ASK, "tools": TOOLS, **fields}
    error = error_of(await client.post(PATH, json={k: v for k, v in body.items() if v is not None}), 400)
    assert error["param"] == param
    assert error["message"].startswith(param)


async def test_a_kind_of_tool_that_is_no_string_is_not_repeated(client) -> None:
    body = {"messages": ASK, "tools": [{**WEATHER, "type": {"a": "x" * 3000}}]}
    message = error_of(await client.post(PATH, json=body), 400)["message"]
    assert message == "tools[0].type is no string, but only function tools are served"


async def test_names_with_dots_and_dashes(client, engine: FakeEngine) -> None:
    await ask(client, max_tokens=1, tools=[{**F, "function": {"name": "ns.Foo_bar-9"}}])


async def test_auto_can_be_off(engine: FakeEngine) -> None:
    async with client_of(make_service(engine, enable_auto_tool_choice=False)) as client:
        for fields in ({}, {"tool_choice": "auto"}):
            error = error_of(await client.post(PATH, json={"messages": ASK, "tools": TOOLS, **fields}), 400)
            assert error["param"] == "tool_choice" and "--enable-auto-tool-choice" in error["message"]
        await ask(client, tool_choice="none", max_tokens=1)
        await ask(client, tool_choice="required", max_tokens=1)


async def test_the_option_chooses_the_format(engine: FakeEngine) -> None:
    engine.script = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    async with client_of(make_service(engine, tool_call_parser="llama3_json")) as client:
        assert (await ask(client))["choices"][0]["finish_reason"] == "tool_calls"
    async with client_of(make_service(engine)) as client:
        assert (await ask(client))["choices"][0]["message"]["content"] == engine.script


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_parsers_that_do_not_exist_are_refused_at_the_start(capsys, name: str) -> None:
    check_parsers(ServerConfig(**{name: "qwen3" if name == "reasoning_parser" else "hermes"}))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    with pytest.raises(SystemExit):
        read_flags(parser, [f"--{name.replace('_', '-')}", "herms"])
    said = capsys.readouterr().err
    assert "'herms'" in said and ("hermes" if name == "tool_call_parser" else "deepseek_r1") in said


# Special tokens


def test_markers_that_are_special_tokens_are_spelled_by_their_id() -> None:
    tokenizer = FakeTokenizer()
    assert spelling("<|user|>", tokenizer) == f"<[{USER}]>"
    assert spelling('<a "b">', tokenizer) == '"<a \\"b\\">"'


def manner(dialect: Dialect, **changes: object) -> Manner:
    use = tool_use(TOOLS, None, None)
    found = Manner(dialect, use, False, True, True, True, False, "assistant", "")
    return replace(found, **changes)  # type: ignore[arg-type]


def test_special_tokens_reach_the_machine_and_nobody_else() -> None:
    dialect = dialect_of(HERMES, None, None)
    special = replace(dialect, tools=replace(dialect.tools, specials=("<|user|>",)))
    tokenizer = FakeTokenizer()
    assert manner(special).wants_specials(tokenizer)
    assert not manner(dialect).wants_specials(tokenizer)
    assert not manner(special, finds_calls=False).wants_specials(tokenizer)
    for hides, content in ((True, "hello <|user|>"), (False, "<s>hello</s> <|user|>")):
        speaker = Speaker(manner(special, hides_specials=hides), tokenizer)
        ids = (BOS, *b"hello", EOS, *b" ", USER, EOS)
        events = speaker.hear(CompletionOutput(0, "<s>hello</s> <|user|>", ids, finish_reason="stop"))
        assert speaker.message(events).content == content


async def test_the_engine_keeps_special_tokens_only_where_they_are_needed(client, engine: FakeEngine) -> None:
    await ask(client, max_tokens=1)
    assert engine.params[-1].skip_special_tokens


def test_special_words_made_of_other_tokens_stay() -> None:
    """HTML looks like the special tokens of some models."""
    dialect = dialect_of(HERMES, None, None)
    special = replace(dialect, tools=replace(dialect.tools, specials=("<|user|>",)))
    html = "<s>old</s>"
    ids = (*html.encode(), EOS)
    for tells_stop, end in ((False, ""), (True, "</s>")):
        whole = [CompletionOutput(0, html + end, ids, finish_reason="stop")]
        pieces = [CompletionOutput(0, chr(byte), (byte,)) for byte in html.encode()]
        streamed = [*pieces, CompletionOutput(0, end, (EOS,), finish_reason="stop")]
        for outputs in (whole, streamed):
            speaker = Speaker(manner(special, tells_stop=tells_stop), FakeTokenizer())
            events = [event for output in outputs for event in speaker.hear(output)]
            assert speaker.message(events).content == html


def test_tokens_are_left_out_however_their_words_arrive() -> None:
    text = "a<s>b<</s>/s>c<s"
    draw = random.Random(1)
    for _ in range(50):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(6)))
        without = Without({BOS: "<s>", EOS: "</s>"})
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        said = without.feed("", (BOS, EOS)) + "".join(without.feed(piece, ()) for piece in pieces) + without.end()
        assert said == "ab</s>c<s"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.replace(" ", "-"))
def test_how_a_text_is_cut_does_not_matter(script: str) -> None:
    text = SCRIPTS[script][0]
    tokenizer, draw = FakeTokenizer(), random.Random(script)
    whole = Speaker(manner(dialect_of(HERMES, None, None)), tokenizer)
    message = whole.message(whole.hear(CompletionOutput(0, text, (), finish_reason="stop")))
    for _ in range(30):
        cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(12)))
        speaker = Speaker(manner(dialect_of(HERMES, None, None)), tokenizer)
        events = [e for a, b in zip([0, *cuts], cuts, strict=False) for e in speaker.hear(piece(text[a:b]))]
        events += speaker.hear(msgspec.structs.replace(piece(text[cuts[-1] if cuts else 0 :]), finish_reason="stop"))
        said = speaker.message(events)
        assert (said.content, spoken(said.tool_calls)) == (message.content, spoken(message.tool_calls))
        assert speaker.finish("stop") == whole.finish("stop")


def piece(text: str) -> CompletionOutput:
    return CompletionOutput(0, text, ())


def spoken(calls) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls or ()]


# Messages about tools


def called(*calls: tuple[str, str, object], **fields: object) -> dict:
    listed = [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]
    return {"role": "assistant", "tool_calls": listed, **fields}


ROUND = [
    *ASK,
    called(("call_a", "get_weather", '{"city": "Rome"}'), ("call_b", "now", ""), content=None),
    {"role": "tool", "tool_call_id": "call_a", "content": "sunny, 20°C"},
    {"role": "tool", "tool_call_id": "call_b", "content": [{"type": "text", "text": "noon"}]},
]


async def test_calls_and_results_reach_the_template(client, engine: FakeEngine) -> None:
    await ask(client, messages=ROUND, max_tokens=1)
    assert engine.tokenizer.rendered[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_a",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
                },
                {"id": "call_b", "type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "sunny, 20°C", "tool_call_id": "call_a", "name": "get_weather"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_b", "name": "now"},
    ]


async def test_templates_get_arguments_as_they_write_them(client, engine: FakeEngine) -> None:
    engine.tokenizer.template = HERMES + "{{ messages[0].tool_calls[0].function.arguments }}"
    await ask(client, messages=ROUND, max_tokens=1)
    assert engine.tokenizer.rendered[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'


async def test_templates_get_ids_as_short_as_they_want_them(client, engine: FakeEngine) -> None:
    engine.script = '[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    engine.tokenizer.template = "{{ tools }}{{ messages }}[TOOL_CALLS]{% if id|length != 9 %}{% endif %}"
    answer = await ask(client, messages=ROUND)
    ids = [engine.tokenizer.rendered[1]["tool_calls"][0]["id"], engine.tokenizer.rendered[2]["tool_call_id"]]
    assert ids == [short_id("call_a")] * 2 and len(ids[0]) == 9
    assert all(len(c["id"]) == 9 for c in answer["choices"][0]["message"]["tool_calls"])


WRONG = [
    (called(("a", "f", "{")), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", "[1]")), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", 3)), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", "[" * 5000)), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", '{"a": "\\ud800"}')), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", '{"a": NaN}')), "messages[1].tool_calls[0].function.arguments"),
    (called(("a", "f", '{"a": ' + "[" * 101 + "]" * 101 + "}")), "messages[1].tool_calls[0].function.arguments"),
    ({"role": "assistant", "tool_calls": [{"id": "a", "type": "function"}]}, "messages[1].tool_calls[0]"),
    ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}, "messages[1].tool_calls[0]"),
    ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}, "messages[1]"),
    ({"role": "tool", "content": "x"}, "messages[1].tool_call_id"),
    ({"role": "tool", "tool_call_id": "a"}, "messages[1].content"),
    ({"role": "function", "name": "f", "content": "x"}, "messages[1]"),
    ({"role": "assistant", "content": "x", "function_call": {"name": "f", "arguments": "{}"}}, "messages[1]"),
]


@pytest.mark.parametrize(("message", "where"), WRONG, ids=lambda v: str(v)[:60])
async def test_messages_that_are_wrong_are_named(client, message: dict, where: str) -> None:
    error = error_of(await client.post(PATH, json={"messages": [*ASK, message]}), 400)
    assert error["param"] == "messages"
    assert error["message"].startswith(where)


# Templates that know no tools


@pytest.fixture
def plain(engine: FakeEngine) -> FakeEngine:
    engine.tokenizer.template = "{{ messages }}"
    return engine


async def test_tools_are_told_in_words(client, plain: FakeEngine) -> None:
    plain.script = '{"name": "get_weather", "arguments": {"city": "Rome"}}'
    choice = (await ask(client))["choices"][0]
    assert [c["function"]["name"] for c in choice["message"]["tool_calls"]] == ["get_weather"]
    system, user = plain.tokenizer.rendered
    assert user == ASK[0]
    assert system["role"] == "system"
    told = {"name": "now", "parameters": {"type": "object", "properties": {}}}
    assert json.dumps(told) in system["content"].splitlines()


async def test_the_words_follow_the_callers_own(client, plain: FakeEngine) -> None:
    await ask(client, max_tokens=1, messages=[{"role": "developer", "content": "Be brief."}, *ASK])
    system, user = plain.tokenizer.rendered
    assert system["content"].startswith("Be brief.\n\nYou can call")
    assert user == ASK[0]


async def test_the_words_say_what_is_wanted(client, plain: FakeEngine) -> None:
    said = {}
    for choice in ("auto", "required", "named"):
        await ask(client, max_tokens=1, tool_choice=NAMED if choice == "named" else choice)
        said[choice] = plain.tokenizer.rendered[0]["content"]
    assert "answer in words" in said["auto"] and "must call a tool" in said["required"]
    assert "must call get_weather" in said["named"] and "now" not in said["named"]
    await ask(client, max_tokens=1, tool_choice="none")
    assert plain.tokenizer.rendered == ASK


async def test_calls_and_results_are_told_in_words(client, plain: FakeEngine) -> None:
    await ask(client, max_tokens=1, messages=[*ROUND, {"role": "user", "content": "Thanks"}], tools=None)
    assert plain.tokenizer.rendered == [
        ASK[0],
        {
            "role": "assistant",
            "content": '[{"name": "get_weather", "arguments": {"city": "Rome"}}, {"name": "now", "arguments": {}}]',
        },
        {"role": "user", "content": "Result of get_weather:\nsunny, 20°C\n\nResult of now:\nnoon\n\nThanks"},
    ]


async def test_a_template_without_a_system_role_gets_the_words_from_the_user(client, plain, monkeypatch) -> None:
    apply = plain.tokenizer.apply_chat_template

    def strict(messages, **options: object) -> str:
        if messages[0]["role"] == "system":
            raise ValueError("chat template: no system role")
        return apply(messages, **options)

    monkeypatch.setattr(plain.tokenizer, "apply_chat_template", strict)
    await ask(client, max_tokens=1)
    [user] = plain.tokenizer.rendered
    assert user["role"] == "user" and user["content"].endswith("\n\nweather in Rome?")
    body = {"messages": [{"role": "system", "content": "x"}, *ASK], "tools": TOOLS}
    assert error_of(await client.post(PATH, json=body), 400)["message"] == "chat template: no system role"


def test_what_is_told_of_templates() -> None:
    parts = "{% for m in messages %}{% for part in m['content'] %}{% endfor %}{% endfor %}"
    assert read("{{ messages }}").takes_strings
    assert (read(parts).takes_parts, read(parts).takes_strings) == (True, False)
    assert read(parts + "{% if m.content is string %}{% endif %}").takes_strings
    assert not read("{{ 'tools' }}{{ tool_calls }}").knows_tools
    assert read("{% if tools %}{% endif %}{% generation %}{% endgeneration %}").knows_tools
    assert read("{{ call.arguments | tojson }}").takes_objects
    assert not read("{{ call['arguments'] + 'x' }}").takes_objects
    assert read("{% if not thinking is defined %}{% set thinking = false %}{% endif %}").switch == "thinking"
    assert read("{{ m.thinking }}{% set thinking = 1 %}{% if thinking %}{% endif %}").switch is None
    assert read("{% if own is defined %}{% set tools = own %}{% endif %}{% if tools %}{% endif %}").knows_tools
    assert read("{% for m in messages %}{% set tools = m %}{% endfor %}{{ tools }}").knows_tools
    both = "{% if a %}{% set tools = a %}{% elif b %}{% set tools = b %}{% else %}{% set tools = c %}{% endif %}"
    assert not read(both + "{{ tools }}").knows_tools
    assert read("{% macro show(tools) %}{% endmacro %}{% set tools = tools or [] %}").knows_tools
    assert read("{{ 'x' * 100000000000 }}{{ 10**10**10 }}").variables == frozenset()
    assert read("{{ broken").variables == frozenset()


async def test_a_demanded_call_cut_before_its_name_leaves_no_content(client, engine) -> None:
    """What was cut is the beginning of a call, not something to say."""
    engine.script = f"{CALL}<tool_ca"
    message = (await ask(client, tool_choice="required"))["choices"][0]["message"]
    assert (message["tool_calls"][0]["function"]["name"], message["content"]) == ("get_weather", None)
