"""Reasoning in chat completions over the fake engine, whose answers are scripted."""

from __future__ import annotations

import httpx
import pytest

from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_completions import stream
from tests.server.test_errors import error_of
from tests.server.test_tools import ASK, CALL, TOOLS, assembled, comparable

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
QWEN = "{{ messages }}{{ tools }}<tool_call></think>{% if enable_thinking %}{% endif %}"
EFFORT = "{{ messages }}{{ reasoning_effort }}</think>"
OPEN = {"chat_template_kwargs": {"opening": "<|user|>assistant:<think>\n"}}
CLOSED = {"chat_template_kwargs": {"opening": "<|user|>assistant:<think>\n\n</think>\n\n"}}


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(max_model_len=4096)
    engine.tokenizer.template = QWEN
    return engine


async def ask(client: httpx.AsyncClient, **fields: object) -> dict:
    response = await client.post(PATH, json={"model": "toy", "messages": ASK, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


CASES: dict[str, tuple[str, dict, str | None, str]] = {
    "thoughts and an answer": ("<think>\nHm.\n</think>\n\nYes.", {}, "Hm.", "Yes."),
    "begun by the prompt": ("Hm.\n</think>\n\nYes.", OPEN, "Hm.", "Yes."),
    "ended by the prompt": ("Yes.", CLOSED, None, "Yes."),
    "no thoughts": ("Yes <or no>.", {}, None, "Yes <or no>."),
    "thoughts without end": ("<think>Hm", {}, "Hm", ""),
    "thoughts, then a call": (f"<think>Hm.</think>{CALL}", {"tools": TOOLS}, "Hm.", ""),
}


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.replace(" ", "-"))
async def test_a_stream_says_what_the_whole_answer_says(client, engine: FakeEngine, case: str) -> None:
    engine.script, fields, reasoning, content = CASES[case]
    choice = (await ask(client, **fields))["choices"][0]
    said = choice["message"]
    assert (said.get("reasoning"), said["content"] or "") == (reasoning, content)
    message, end = assembled(await stream(client, PATH, messages=ASK, **fields))
    assert (comparable(message), end) == (comparable(said), choice["finish_reason"])


async def test_reasoning_can_be_left_out(client, engine: FakeEngine) -> None:
    engine.script = CASES["thoughts and an answer"][0]
    told = {"logprobs": True, "return_token_ids": True}
    answer = await ask(client, include_reasoning=False, **told)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = await stream(client, PATH, messages=ASK, include_reasoning=False, **told)
    message, _ = assembled(chunks)
    assert "reasoning" not in message and message["content"] == "Yes."
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [t for c in choices for t in c.get("token_ids", ())] == answer["choices"][0]["token_ids"]


async def test_usage_counts_the_tokens_of_the_thoughts(client, engine: FakeEngine) -> None:
    """The fake's markers are several tokens, so those of the text count."""
    engine.script = "<think>\nHm.\n</think>\n\nYes."
    assert (await ask(client, n=2))["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, PATH, messages=ASK, stream_options=options)
    counted = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks]
    assert counted == sorted(counted) and counted[0] == 0 and counted[-1] == 3
    engine.tokenizer.template = "{{ messages }}"
    assert "completion_tokens_details" not in (await ask(client))["usage"]


async def test_markers_that_are_tokens_are_counted_with_the_thoughts(client, engine: FakeEngine, monkeypatch) -> None:
    """Here each is one: the markers, and what is between them."""
    encode = engine.tokenizer.encode

    def one(text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(text[1])] if text in ("<think>", "</think>") else encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", one)
    engine.script = "thinking/ and /t"
    found = (await ask(client))["usage"]["completion_tokens_details"]
    assert found == {"reasoning_tokens": len("thinking/")}


@pytest.mark.parametrize(
    ("said", "script", "reasoning", "content", "end"),
    [
        ("a <b>", "old</b>", None, "old</b>", None),
        ("<think>a", "b</think>c", "b", "c", "</think>"),
        ("<think>a</think>b", "c", None, "c", None),
    ],
)
@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
async def test_an_answer_that_goes_on_with_a_message(
    engine: FakeEngine, parser: str, said: str, script: str, reasoning: str | None, content: str, end: str | None
) -> None:
    """Only that message says whether it goes on inside thoughts: a tag at its end is no header of an answer."""
    messages = [*ASK, {"role": "assistant", "content": said}]
    engine.script = script
    async with client_of(make_service(engine, reasoning_parser=parser)) as client:
        answer = await ask(client, messages=messages, continue_final_message=True)
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    assert engine.thinking_ends[-1] == end


async def test_thoughts_are_counted_also_where_only_their_end_is_a_token(client, engine, monkeypatch) -> None:
    """As in gpt-oss: the marker of its beginning is three tokens."""
    encode = engine.tokenizer.encode
    one = lambda text, add_special_tokens=True: [1] if text == "<|end|>" else encode(text, add_special_tokens)  # noqa: E731
    monkeypatch.setattr(engine.tokenizer, "encode", one)
    engine.tokenizer.template = "{{ messages }}{{ reasoning_effort }}<|channel|>"
    engine.script = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    answer = await ask(client)
    assert answer["choices"][0]["message"]["reasoning"] == "Hm."
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


async def test_long_thoughts_are_not_counted_again_in_every_chunk(client, engine: FakeEngine, monkeypatch) -> None:
    engine.script = f"<think>{'x' * 2500}</think>Yes."
    encode, sizes = engine.tokenizer.encode, []

    def watched(text: str, add_special_tokens: bool = True) -> list[int]:
        if text.startswith("x"):
            sizes.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(engine.tokenizer, "encode", watched)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, PATH, messages=ASK, max_tokens=3000, stream_options=options)
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2500}
    assert sizes and max(sizes) <= 1000
    answer = await ask(client, max_tokens=3000)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2500}


async def test_the_engine_hears_where_thinking_ends(client, engine: FakeEngine) -> None:
    for fields, end in (({}, "</think>"), (OPEN, "</think>"), (CLOSED, None)):
        await ask(client, max_tokens=1, **fields)
        assert engine.thinking_ends[-1] == end
    for template in ("{{ messages }}", "{{ messages }}</think>"):
        engine.tokenizer.template = template
        await ask(client, max_tokens=1)
        assert engine.thinking_ends[-1] is None
    async with client_of(make_service(engine, reasoning_parser="qwen3")) as told:
        await ask(told, max_tokens=1)
        assert engine.thinking_ends[-1] == "</think>"


async def test_a_budget_reaches_the_engine_of_a_model_that_thinks(client, engine: FakeEngine) -> None:
    await ask(client, max_tokens=1, thinking_token_budget=7)
    assert engine.params[-1].thinking_token_budget == 7
    body = {"messages": ASK, "thinking_token_budget": -1}
    assert error_of(await client.post(PATH, json=body), 400)["param"] == "thinking_token_budget"
    engine.tokenizer.template = "{{ messages }}"
    body = {"messages": ASK, "thinking_token_budget": 7}
    assert error_of(await client.post(PATH, json=body), 400)["param"] == "thinking_token_budget"


EFFORTS: list[tuple[str, dict, dict | None]] = [
    (EFFORT, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    (EFFORT, {"reasoning_effort": "none"}, {"reasoning_effort": "none"}),
    (EFFORT, {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, {"reasoning_effort": "x"}),
    (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}),
    (QWEN, {"reasoning_effort": "low"}, {"enable_thinking": True}),
    (
        QWEN,
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"enable_thinking": True},
    ),
    ("{{ thinking }}</think>", {"reasoning_effort": "max"}, {"thinking": True}),
    ("{{ messages }}", {"reasoning_effort": "none"}, {}),
    ("{{ messages }}", {"reasoning_effort": "low"}, None),
    ("{{ messages }}</think>", {"reasoning_effort": "none"}, None),
    (EFFORT, {"reasoning_effort": "enormous"}, None),
]


@pytest.mark.parametrize(("template", "fields", "variables"), EFFORTS, ids=lambda v: str(v)[:50])
async def test_efforts_take_effect_or_are_refused(
    client, engine: FakeEngine, monkeypatch, template: str, fields: dict, variables: dict | None
) -> None:
    engine.tokenizer.template = template
    apply, seen = engine.tokenizer.apply_chat_template, []

    def watched(*args: object, kwargs: dict, **options: object) -> str:
        seen.append(kwargs)
        return apply(*args, kwargs=kwargs, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", watched)
    if variables is None:
        body = {"messages": ASK, **fields}
        assert error_of(await client.post(PATH, json=body), 400)["param"] == "reasoning_effort"
    else:
        await ask(client, max_tokens=1, **fields)
        assert seen == [variables]


async def test_tokenize_takes_an_effort_as_chats_do(client, engine: FakeEngine) -> None:
    effort = {"messages": ASK, "reasoning_effort": "low"}
    engine.tokenizer.template = EFFORT
    assert (await client.post("/tokenize", json=effort)).status_code == 200
    engine.tokenizer.template = "{{ messages }}"
    assert error_of(await client.post("/tokenize", json=effort), 400)["message"].startswith("reasoning_effort")


async def test_earlier_thoughts_reach_the_template(client, engine: FakeEngine) -> None:
    for name in ("reasoning", "reasoning_content"):
        messages = [*ASK, {"role": "assistant", "content": "Yes.", name: "Hm."}, *ASK]
        await ask(client, max_tokens=1, messages=messages)
        assert engine.tokenizer.rendered[1] == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


async def test_the_option_beats_the_template(engine: FakeEngine) -> None:
    engine.script = "<think>Hm.</think>Yes."
    async with client_of(make_service(engine, reasoning_parser="none")) as client:
        assert (await ask(client))["choices"][0]["message"]["content"] == engine.script
    engine.tokenizer.template = "{{ messages }}"
    async with client_of(make_service(engine, reasoning_parser="qwen3")) as client:
        assert (await ask(client))["choices"][0]["message"]["content"] == "Yes."
