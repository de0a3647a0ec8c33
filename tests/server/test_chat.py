"""/v1/chat/completions over the fake engine, whose answers are known."""

from __future__ import annotations

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.test_completions import stream

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


async def ask(client: httpx.AsyncClient, **fields: object) -> dict:
    response = await client.post(PATH, json={"model": "toy", "messages": HELLO, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_an_answer_has_openais_shape(client) -> None:
    answer = await ask(client, max_tokens=3)
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer == {
        "object": "chat.completion",
        "model": "toy",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 23,
            "completion_tokens": 3,
            "total_tokens": 26,
            "prompt_tokens_details": {"cached_tokens": 16},
        },
        "system_fingerprint": None,
    }


async def test_a_stream_begins_with_the_role_and_ends_once(client) -> None:
    chunks = await stream(client, PATH, messages=HELLO, max_tokens=2, stream_options={"include_usage": True})
    choices = [c["choices"][0] for c in chunks[:-1]]
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "length"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] == 25


async def test_every_choice_of_a_stream_has_a_role_and_an_end(client) -> None:
    chunks = await stream(client, PATH, messages=HELLO, max_tokens=2, n=3)
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == "ab"
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]


async def test_the_answer_may_fill_the_context(client, engine: FakeEngine) -> None:
    engine.max_model_len = 40
    answer = await ask(client)
    assert answer["usage"]["total_tokens"] == 40
    engine.default_params = {"max_tokens": 4}
    assert (await ask(client))["usage"]["completion_tokens"] == 4


async def test_the_newer_name_of_max_tokens_wins(client) -> None:
    assert (await ask(client, max_completion_tokens=2, max_tokens=9))["usage"]["completion_tokens"] == 2


async def test_text_parts_are_one_text(client, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    one = await ask(client, max_tokens=1, return_token_ids=True)
    assert one["prompt_token_ids"] == engine.tokenizer.encode("<|user|>user:hello\n<|user|>assistant:", False)
    assert one["choices"][0]["token_ids"] == [ord("a")]
    single = await ask(
        client, max_tokens=1, messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    )
    assert single["usage"] == one["usage"]
    both = await ask(client, max_tokens=1, messages=[{"role": "user", "content": parts}])
    assert both["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"] + 1


async def test_a_developer_is_a_system(client) -> None:
    found = [
        (await ask(client, max_tokens=1, return_token_ids=True, messages=[{"role": role, "content": "x"}, *HELLO]))
        for role in ("system", "developer")
    ]
    assert found[0]["prompt_token_ids"] == found[1]["prompt_token_ids"]


async def test_the_last_message_can_be_continued(client) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "opq"}]
    answer = await ask(
        client, max_tokens=2, messages=messages, continue_final_message=True, add_generation_prompt=False
    )
    assert answer["choices"][0]["message"]["content"] == "rs"
    assert (await ask(client, max_tokens=2, messages=messages, continue_final_message=True)) is not None


async def test_variables_reach_the_template(client) -> None:
    answer = await ask(client, max_tokens=2, chat_template_kwargs={"opening": "k"})
    assert answer["choices"][0]["message"]["content"] == "lm"


async def test_logprobs_carry_exact_bytes(client) -> None:
    answer = await ask(client, max_tokens=3, logprobs=True, top_logprobs=2, chat_template_kwargs={"opening": "!"})
    content = answer["choices"][0]["logprobs"]["content"]
    assert (
        bytes(byte for t in content for byte in t["bytes"]).decode()
        == answer["choices"][0]["message"]["content"]
        == "éa"
    )
    assert [t["token"] for t in content] == ["bytes:\\xc3", "bytes:\\xa9", "a"]
    for entry in content:
        best = entry["top_logprobs"]
        assert len(best) == 2
        assert best[0]["token"] == entry["token"]
        assert best[0]["logprob"] == entry["logprob"] > best[1]["logprob"]


async def test_a_chosen_token_that_is_not_among_the_best_is_not_listed_there(client) -> None:
    answer = await ask(client, max_tokens=1, logprobs=True, top_logprobs=2, logit_bias={str(ord("q")): 100})
    [entry] = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "q"
    assert [t["token"] for t in entry["top_logprobs"]] == ["a", "b"]


async def test_logprobs_without_alternatives(client) -> None:
    answer = await ask(client, max_tokens=2, logprobs=True)
    assert [t["top_logprobs"] for t in answer["choices"][0]["logprobs"]["content"]] == [[], []]
    chunks = await stream(client, PATH, messages=HELLO, max_tokens=3, logprobs=True)
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [t["token"] for f in found if f for t in f["content"]] == ["a", "b", "c"]


async def test_the_prompts_logprobs_stand_beside_the_choices(client) -> None:
    answer = await ask(client, max_tokens=1, prompt_logprobs=1)
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None


async def test_the_callers_id_is_shown_but_never_shared(client, engine: FakeEngine) -> None:
    first = await ask(client, max_tokens=1, request_id="mine")
    second = await ask(client, max_tokens=1, request_id="mine")
    assert first["id"] == second["id"] == "chatcmpl-mine"
    assert len(set(engine.seen)) == 2


async def test_the_alias_answers_by_its_own_name(client) -> None:
    assert (await ask(client, max_tokens=1, model="alias"))["model"] == "alias"
