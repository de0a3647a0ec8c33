"""How chat requests use templates: parts, variables, documents, echo, and templates that they bring themselves."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest

from jaxserve.config import ServerConfig
from server import template_process
from server.openai import messages
from server.openai.protocol import Message
from server.template_process import Job, TemplateProcess
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_chat import HELLO, ask
from tests.server.test_completions import stream
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = PARTS + "{% if m.content is string %}{% endif %}"
TWO = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]}]
AS_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]

CONTENTS: list[tuple[str, str, list, object]] = [
    ("{{ messages }}", "auto", TWO, "a\nb"),
    ("{{ messages }}", "openai", TWO, AS_PARTS),
    ("{{ messages }}", "openai", HELLO, [{"type": "text", "text": "hello"}]),
    (PARTS, "auto", TWO, AS_PARTS),
    (PARTS, "auto", HELLO, [{"type": "text", "text": "hello"}]),
    (EITHER, "auto", TWO, AS_PARTS),
    (EITHER, "auto", HELLO, "hello"),
    (PARTS, "string", TWO, "a\nb"),
]


@pytest.mark.parametrize(("template", "form", "messages", "content"), CONTENTS)
async def test_contents_are_what_the_template_takes(
    engine: FakeEngine, template: str, form: str, messages: list, content: object
) -> None:
    engine.tokenizer.template = template
    async with client_of(make_service(engine, chat_template_content_format=form)) as client:
        await ask(client, messages=messages, max_tokens=1)
    assert engine.tokenizer.rendered[0]["content"] == content


async def test_a_requests_variables_beat_the_servers(engine: FakeEngine) -> None:
    async with client_of(make_service(engine, default_chat_template_kwargs={"opening": "k"})) as client:
        assert (await ask(client, max_tokens=1))["choices"][0]["message"]["content"] == "l"
        other = await ask(client, max_tokens=1, chat_template_kwargs={"opening": "o"})
        assert other["choices"][0]["message"]["content"] == "p"


def test_default_variables_are_a_json_object() -> None:
    assert ServerConfig(default_chat_template_kwargs='{"a": 1}').default_chat_template_kwargs == {"a": 1}  # type: ignore[arg-type]
    for wrong in ("[1]", "{", 3):
        with pytest.raises(ValueError, match="default_chat_template_kwargs must be a JSON object"):
            ServerConfig(default_chat_template_kwargs=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chat_template_content_format"):
        ServerConfig(chat_template_content_format="html")


async def test_variables_cannot_replace_what_templates_are_given(client) -> None:
    body = {"messages": HELLO, "chat_template_kwargs": {"messages": []}}
    assert error_of(await client.post(PATH, json=body), 400)["param"] == "chat_template_kwargs"


async def test_documents_need_a_template_that_takes_them(client, engine: FakeEngine) -> None:
    documents = [{"title": "T", "text": "x"}]
    assert (
        error_of(await client.post(PATH, json={"messages": HELLO, "documents": documents}), 400)["param"] == "documents"
    )
    before = (await ask(client, max_tokens=1))["usage"]["prompt_tokens"]
    engine.tokenizer.template = "{{ documents }}{{ messages }}"
    assert (await ask(client, max_tokens=1, documents=documents))["usage"]["prompt_tokens"] > before


async def test_the_continued_message_can_be_repeated(client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "opq"}]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 2}
    assert (await ask(client, echo=True, **fields))["choices"][0]["message"]["content"] == "opqrs"
    assert (await ask(client, **fields))["choices"][0]["message"]["content"] == "rs"
    chunks = await stream(client, PATH, echo=True, n=2, **fields)
    for index in (0, 1):
        mine = [c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(mine) == "opqrs"
    assert (await ask(client, max_tokens=2, echo=True))["choices"][0]["message"]["content"] == "ab"


async def test_the_role_of_answers(engine: FakeEngine) -> None:
    async with client_of(make_service(engine, response_role="bot")) as client:
        assert (await ask(client, max_tokens=1))["choices"][0]["message"]["role"] == "bot"
        chunks = await stream(client, PATH, messages=HELLO, max_tokens=1)
        assert chunks[0]["choices"][0]["delta"]["role"] == "bot"
        mine = [*HELLO, {"role": "assistant", "content": "opq"}]
        answer = await ask(client, max_tokens=1, messages=mine, continue_final_message=True)
        assert answer["choices"][0]["message"]["role"] == "assistant"


async def test_a_model_without_a_template(client, engine: FakeEngine) -> None:
    engine.tokenizer.template = None
    assert "--chat-template" in error_of(await client.post(PATH, json={"messages": HELLO}), 400)["message"]


async def test_tokenize_sees_what_chats_see(client, engine: FakeEngine) -> None:
    engine.tokenizer.template = "{{ tools }}{{ documents }}"
    fields = {"tools": [{"type": "function", "function": {"name": "f"}}], "documents": [{"text": "x"}]}
    chat = await ask(client, max_tokens=1, return_token_ids=True, **fields)
    found = await client.post("/tokenize", json={"messages": HELLO, **fields})
    assert found.json()["tokens"] == chat["prompt_token_ids"]


async def test_more_messages_than_tokens_are_refused(client, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": ""}] * (engine.max_model_len + 1)}
    error = error_of(await client.post(PATH, json=body), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "fields",
    [
        {"documents": [{"text": "x" * 5000}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 5000}}]},
        {"chat_template_kwargs": {"last": "x" * 5000}},
    ],
    ids=lambda fields: next(iter(fields)),
)
async def test_much_to_render_does_not_hold_up_the_loop(client, engine: FakeEngine, monkeypatch, fields: dict) -> None:
    engine.tokenizer.template = "{{ messages }}{{ documents }}{{ tools }}"
    render, threads = engine.tokenizer.apply_chat_template, []

    def watched(*given: object, **named: object) -> str:
        threads.append(threading.current_thread())
        return render(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", watched)
    await client.post(PATH, json={"messages": HELLO, **fields})
    assert threads and threads[0] is not threading.main_thread()


async def test_long_arguments_are_read_beside_the_loop(client, engine: FakeEngine, monkeypatch) -> None:
    engine.tokenizer.template = "{{ messages }}{{ tools }}"
    read, threads = messages.checked, []

    def watched(given: Sequence[Message]) -> list[messages.Told]:
        threads.append(threading.current_thread())
        return read(given)

    monkeypatch.setattr(messages, "checked", watched)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": "x" * 5000})}}
    await client.post(PATH, json={"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]})
    assert threads and threads[0] is not threading.main_thread()


# Templates from requests


async def test_templates_of_requests_need_trust(client) -> None:
    error = error_of(await client.post(PATH, json={"messages": HELLO, "chat_template": "{{ messages }}"}), 400)
    assert error["param"] == "chat_template" and "--trust-request-chat-template" in error["message"]


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture
async def trusting(engine: FakeEngine, templates: TemplateProcess) -> AsyncIterator[httpx.AsyncClient]:
    service = make_service(engine, trust_request_chat_template=True)
    service.templates = templates
    async with client_of(service) as client:
        yield client


async def test_a_template_of_a_request_is_used(trusting) -> None:
    client = trusting
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].function.name }}{{ last }}"
    tools = [{"type": "function", "function": {"name": "f"}}]
    fields = {"chat_template": template, "tools": tools, "chat_template_kwargs": {"last": "r"}}
    answer = await ask(client, max_tokens=1, return_token_ids=True, **fields)
    assert bytes(answer["prompt_token_ids"]) == b"<s>hellofr"
    assert answer["choices"][0]["message"]["content"] == "s"
    found = await client.post("/tokenize", json={"messages": HELLO, **fields})
    assert found.json()["tokens"] == answer["prompt_token_ids"]


async def test_templates_of_requests_that_fail(trusting) -> None:
    client = trusting
    for template, why in (
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ broken", "unexpected end"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('\\ud800 not so') }}", "? not so"),
        ("{{ 'x' * 10000000000 }}", "memory"),
        ("{{ " + "(" * 50_000, "recursion"),
        ("", "1 to"),
        ("x" * (256 * 1024 + 1), "1 to"),
    ):
        error = error_of(await client.post(PATH, json={"messages": HELLO, "chat_template": template}), 400)
        assert error["param"] == "chat_template"
        assert why in error["message"]


async def test_half_a_surrogate_pair_in_a_template_is_a_question_mark(templates: TemplateProcess) -> None:
    assert await templates.render(Job(template="{{ '\\ud800' }}", messages=[])) == "?"


async def test_a_template_that_never_ends_is_ended_and_holds_nobody_up(trusting, templates, monkeypatch) -> None:
    client = trusting
    await templates.render(Job(template="x", messages=[]))
    monkeypatch.setattr(template_process, "MAX_SECONDS", 0.3)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    slow = asyncio.create_task(client.post(PATH, json={"messages": HELLO, "chat_template": endless}))
    await asyncio.sleep(0.05)
    began = time.monotonic()
    await ask(client, max_tokens=1)
    assert (await client.get("/health")).status_code == 200
    assert time.monotonic() - began < 0.25 and not slow.done()
    assert "more than 0.3 s" in error_of(await slow, 400)["message"]
    monkeypatch.undo()
    assert (await ask(client, max_tokens=1, chat_template="c"))["choices"][0]["message"]["content"] == "d"


async def test_the_process_ends_with_its_owner(templates: TemplateProcess) -> None:
    assert await templates.render(Job(template="{{ a }}", messages=[], variables={"a": 1})) == "1"
    child = templates._process
    templates.close()
    assert child is not None and child.poll() is not None


def test_an_answer_that_was_cut_is_none() -> None:
    """As when the process is killed while it writes."""
    stream = io.BytesIO()
    template_process._write(stream, template_process.Rendered("text"))
    for size in (3, len(stream.getvalue()) - 1):
        assert template_process._read(io.BytesIO(stream.getvalue()[:size]), template_process.Rendered) is None


def test_a_process_that_was_never_needed_does_not_start() -> None:
    process = TemplateProcess()
    process.close()
    assert process._process is None


def test_the_process_does_not_get_the_servers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXSERVE_API_KEY", "secret")
    assert "secret" not in template_process._environment().values()
