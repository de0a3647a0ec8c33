"""`truncate_prompt_tokens`: which tokens of a prompt are left, and what the answer says of it."""

from __future__ import annotations

import httpx
import pytest

from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def left(client: httpx.AsyncClient, path: str, **fields: object) -> tuple[str, int]:
    """The prompt that the model saw, as text, and the count of its tokens."""
    body = {"temperature": 0, "max_tokens": 2, "return_token_ids": True, **fields}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    ids = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
    return bytes(i for i in ids if i < 256).decode(), answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"truncate_prompt_tokens": 3}, "cde"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "cde"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 5}, "abcde"),
        ({"truncate_prompt_tokens": 1000}, "abcde"),
        ({"truncate_prompt_tokens": -1}, "abcde"),
        ({"truncation_side": "left"}, "abcde"),
    ],
    ids=str,
)
async def test_the_last_tokens_are_left_or_the_first(client, fields: dict, text: str) -> None:
    for prompt in ("abcde", [*b"abcde"]):
        asked = {"prompt": prompt, "add_special_tokens": False, **fields}
        assert await left(client, COMPLETIONS, **asked) == (text, len(text))


async def test_each_prompt_is_truncated_and_echoed_as_it_was_seen(client) -> None:
    body = {"prompt": ["abcde", "xy"], "truncate_prompt_tokens": 3, "echo": True, "max_tokens": 1, "temperature": 0}
    answer = (await client.post(COMPLETIONS, json=body)).json()
    assert [c["text"] for c in answer["choices"]] == ["cdef", "xyz"]


async def test_minus_one_leaves_what_the_answer_needs(client, engine: FakeEngine) -> None:
    engine.max_model_len = 20
    prompt = "abcdefghijklmnopqrstuvwxyz" * 1000
    assert await left(client, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=5) == (prompt[-15:], 15)
    assert await left(client, COMPLETIONS, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=None) == ("wxyz", 4)


async def test_a_truncated_prompt_must_still_leave_room(client, engine: FakeEngine) -> None:
    engine.max_model_len = 20
    body = {"prompt": "a" * 50, "truncate_prompt_tokens": 18, "max_tokens": 5}
    response = await client.post(COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


async def test_a_chat_is_truncated_after_its_template(client) -> None:
    messages = [{"role": "user", "content": "hello"}]
    whole, count = await left(client, CHAT, messages=messages)
    assert await left(client, CHAT, messages=messages, truncate_prompt_tokens=4) == (whole[-4:], 4)
    first, _ = await left(client, CHAT, messages=messages, truncate_prompt_tokens=4, truncation_side="right")
    assert first and whole.startswith(first)
    assert await left(client, CHAT, messages=messages, truncate_prompt_tokens=-1) == (whole, count)
