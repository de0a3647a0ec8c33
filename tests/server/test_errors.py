"""What is refused, and how: every error in OpenAI's shape, none of them a 5xx that a request can cause."""

from __future__ import annotations

import json

import httpx
import pytest

from server.body import MAX_BODY
from server.openai.fields import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS
from server.service import Service
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert len(response.content) < 10_000
    found = response.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in found["error"]["message"]
    return found["error"]


BOTH: list[tuple[dict, str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": 0.5}, "top_k"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": "x"}, "top_k"),
    ({"min_p": -1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"n": 0}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**30}, "seed"),
    ({"seed": "100"}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"logit_bias": {"AI": -100}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": {"259": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"prompt_logprobs": -2}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"priority": 1}, "priority"),
    ({"priority": 10**30}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1025}, "cache_salt"),
    ({"request_id": ""}, "request_id"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "n": 11}, "n"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "top_k": 4}, "top_k"),
    ({"use_beam_search": True, "min_p": 0.1}, "min_p"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "frequency_penalty": 1}, "frequency_penalty"),
    ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"use_beam_search": True, "min_tokens": 2}, "min_tokens"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "stop_token_ids": [1]}, "stop_token_ids"),
    ({"use_beam_search": True, "logit_bias": {"97": 1}}, "logit_bias"),
    ({"use_beam_search": True, "allowed_token_ids": [97]}, "allowed_token_ids"),
    ({"use_beam_search": True, "bad_words": ["x"]}, "bad_words"),
    ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True, "structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"prompt_embeds": "abc"}, "prompt_embeds"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1024}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1.5}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"thinking_token_budget": 5}, "thinking_token_budget"),
    ({"repetition_detection": {}}, "repetition_detection"),
    ({"watermarking": True}, "watermarking"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"logprob_token_ids": [1]}, "logprob_token_ids"),
]
ONLY_COMPLETIONS: list[tuple[dict, str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[], [97]]}, "prompt"),
    ({"prompt": [97, "a"]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [97, -1]}, "prompt"),
    ({"prompt": [259]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"prompt": ["x"] * 1000, "n": 128}, "n"),
    ({"prompt": "x" * 1024}, "prompt"),
    ({"prompt": "x" * 1000, "max_tokens": 24}, "max_tokens"),
    ({"prompt": "x" * 1_000_000}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"suffix": "the end"}, "suffix"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"best_of": 2, "n": 3}, "best_of"),
    ({"best_of": 2, "n": 0}, "n"),
    ({"best_of": 2, "n": -3}, "n"),
    ({"best_of": 3, "n": 2, "stream": True}, "best_of"),
    ({"best_of": "3"}, "best_of"),
    ({"prompt": ["x"] * 1000, "best_of": 128}, "best_of"),
    ({"use_beam_search": True, "best_of": 11}, "best_of"),
    ({"use_beam_search": True, "echo": True, "logprobs": 1}, "logprobs"),
]
ONLY_CHAT: list[tuple[dict, str]] = [
    ({"best_of": 3}, "best_of"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [7] * 3000}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 5000}, "max_completion_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": -3, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"documents": [{"a": "b"}]}, "documents"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_COMPLETIONS, ids=lambda v: str(v)[:40])
async def test_completions_refuse(client, fields: dict, param: str) -> None:
    body = {"model": "toy", "prompt": "x", **fields}
    error = error_of(await client.post(COMPLETIONS, json=body), 400)
    assert error["param"] == param
    assert error["message"].startswith(param) or "context length" in error["message"]


@pytest.mark.parametrize(("fields", "param"), BOTH + ONLY_CHAT, ids=lambda v: str(v)[:40])
async def test_chat_refuses(client, fields: dict, param: str) -> None:
    body = {"model": "toy", "messages": HELLO, **fields}
    error = error_of(await client.post(CHAT, json=body), 400)
    assert error["param"] == param


@pytest.mark.parametrize("name", sorted(REFUSED_IN_COMPLETIONS))
async def test_completions_refuse_each_field_that_has_no_effect_by_its_name(client, name: str) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "x", name: {"some": "value"}}), 400)
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize("name", sorted(REFUSED_IN_CHAT))
async def test_chat_refuses_each_field_that_has_no_effect_by_its_name(client, name: str) -> None:
    error = error_of(await client.post(CHAT, json={"messages": HELLO, name: {"some": "value"}}), 400)
    assert error["param"] == name and name in error["message"]


@pytest.mark.parametrize(("fields", "param"), [*BOTH[:3], ({"prompt": []}, "prompt")], ids=lambda v: str(v)[:40])
async def test_a_stream_that_cannot_begin_is_an_ordinary_error(client, fields: dict, param: str) -> None:
    body = {"model": "toy", "prompt": "x", "stream": True, **fields}
    assert error_of(await client.post(COMPLETIONS, json=body), 400)["param"] == param


async def test_too_long_says_the_numbers(client) -> None:
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "x" * 1000, "max_tokens": 50}), 400)
    assert error["code"] == "context_length_exceeded"
    assert all(number in error["message"] for number in ("1001", "50", "1051", "1024"))


HARMLESS = {
    "user": "u", "metadata": {"k": "v"}, "store": False, "service_tier": "auto", "safety_identifier": "x",
    "prompt_cache_key": "k", "parallel_tool_calls": True, "some_unknown_field": [1], "tool_choice": "none",
    "response_format": {"type": "text"}, "best_of": 1, "logit_bias": {}, "stop": None, "suffix": None,
    "functions": None, "seed": -1, "modalities": ["text"], "n": None, "max_tokens": 2, "stream": None,
    "stop_token_ids": [],
}  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_fields_that_change_nothing_are_tolerated(client, path: str) -> None:
    response = await client.post(path, json={"model": "toy", "prompt": "x", "messages": HELLO, **HARMLESS})
    assert response.status_code == 200, response.text


async def test_an_unknown_field_is_logged_once(client, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 1, "strange": 1, "user": "u"})
    assert [r.getMessage() for r in caplog.records if "strange" in r.getMessage()] == [
        "request field 'strange' is not known and has no effect"
    ]
    assert not any("user" in r.getMessage() for r in caplog.records)


BROKEN = [
    b"", b"{", b"[1]", b'"x"', b"null", b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x \\ud83d"}', b'{"prompt": "x", "stop": ["\\udc00"]}',
    b'{"prompt": "x", "model": "\\ud83d"}', b'{"prompt": "x", "other": {"a": ["\\ud83d x"]}}', b'{"prompt": "\xff"}',
    b'{"prompt": "x", "other": ' + b"[" * 100_000, b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "x"} trailing',
    b'{"prompt": "x", "messages": [{"role": "user", "content": "\\ud83d"}], "tools": [{"name": "\\ud83d"}]}',
]  # fmt: skip


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("data", BROKEN, ids=lambda data: data[:30].decode("latin-1"))
async def test_broken_bodies_are_the_callers_mistake(client, path: str, data: bytes) -> None:
    error_of(await client.post(path, content=data, headers={"content-type": "application/json"}), 400)


@pytest.mark.parametrize("number", [b"1e999", b"9" * 10_000, b"-" + b"9" * 400, b"01", b"0x1"])
@pytest.mark.parametrize("field", [b"temperature", b"seed"])
async def test_numbers_out_of_range_are_the_callers_mistake(client, field: bytes, number: bytes) -> None:
    data = b'{"prompt": "x", "' + field + b'": ' + number + b"}"
    error_of(await client.post(COMPLETIONS, content=data), 400)


async def test_other_content_types_are_refused(client) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        error_of(await client.post(COMPLETIONS, content=b"{}", headers={"content-type": kind}), 415)
    for kind in ("application/json; charset=utf-8", ""):
        response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": kind})
        assert response.status_code == 200


async def test_large_bodies_are_cut_off(client) -> None:
    error_of(await client.post(COMPLETIONS, content=b" " * (MAX_BODY + 1)), 413)

    async def endless():
        while True:
            yield b" " * 1_000_000

    error_of(await client.post(COMPLETIONS, content=endless()), 413)


async def test_routes_and_methods_and_models_that_are_not_there(client) -> None:
    for path in ("/", "/v1", "/v1/completions/", "//v1/completions", "/V1/completions", "/v1/embeddings"):
        assert error_of(await client.post(path, json={}), 404)["code"] == "unknown_url"
    assert error_of(await client.get(COMPLETIONS), 405)["code"] == "method_not_allowed"
    for body in ({"model": "gpt", "prompt": "x"}, {"model": "", "prompt": "x"}):
        error = error_of(await client.post(COMPLETIONS, json=body), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error_of(await client.post(CHAT, json={"model": "x" * 100_000, "messages": HELLO}), 404)
    assert error_of(await client.get("/v1/models/gpt"), 404)["code"] == "model_not_found"


async def test_an_unexpected_failure_tells_nothing(client, engine: FakeEngine, monkeypatch, caplog) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(engine, "generate", fail)
    error = error_of(await client.post(COMPLETIONS, json={"prompt": "x"}), 500)
    assert "secret" not in error["message"]
    assert "secret" in caplog.text


async def test_a_failure_in_the_middle_of_a_stream_is_an_event(client, engine: FakeEngine) -> None:
    engine.delay = 0.01
    lines: list[str] = []
    body = {"prompt": "x", "stream": True, "max_tokens": 500}

    def die() -> None:
        engine.dead = RuntimeError("boom")

    generate = engine.generate

    async def dying(*args: object, **kwargs: object):
        async for output in generate(*args, **kwargs):  # type: ignore[arg-type]
            yield output
            die()

    engine.generate = dying  # type: ignore[method-assign]
    async with client.stream("POST", COMPLETIONS, json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "engine_dead")
    assert error_of(await client.get("/v1/models"), 503)["code"] == "engine_dead"
    assert (await client.get("/health")).status_code == 503


async def test_while_the_model_loads() -> None:
    service: Service = make_service(None)
    service.report("loading weights", 0.25)
    async with client_of(service) as client:
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json() == {"status": "loading", "stage": "loading weights", "progress": 0.25}
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO}), ("/tokenize", {"prompt": "x"})):
            error = error_of(await client.post(path, json=body), 503)
            assert error["code"] == "loading"
            assert "loading weights, 25%" in error["message"]
        assert error_of(await client.get("/v1/models"), 503)["code"] == "loading"
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200
        service.engine = FakeEngine()
        health = await client.get("/health")
        assert (health.status_code, health.content) == (200, b"")
