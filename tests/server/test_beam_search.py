"""Beam search over HTTP: completions and chat, on the fake engine, whose likeliest answers can be written down."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from jaxserve.types import SamplingParams
from server.openai.generating import Names, collect, start
from server.openai.prompts import Prompt
from server.openai.protocol import CompletionRequest
from tests.server.fake_engine import BOS, EOS, FakeEngine

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


async def ask(client: httpx.AsyncClient, path: str = COMPLETIONS, **fields: object) -> dict:
    prompt = {"messages": [{"role": "user", "content": "ab"}]} if path == CHAT else {"prompt": "ab"}
    response = await client.post(path, json={"use_beam_search": True, "temperature": 0, **prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_the_likeliest_answers_come_best_first(client) -> None:
    """After a letter the next one is likeliest, then the one after it, and so on."""
    answer = await ask(client, n=3, max_tokens=2, logprobs=0)
    choices = answer["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert choices[0]["text"] == "cd"
    totals = [sum(c["logprobs"]["token_logprobs"]) for c in choices]
    assert totals == sorted(totals, reverse=True)
    assert {c["text"] for c in choices[1:]} == {"ce", "de"}
    assert all(c["finish_reason"] == "length" for c in choices)
    assert answer["usage"]["completion_tokens"] == 6


async def test_one_beam_is_the_greedy_answer(client) -> None:
    [choice] = (await ask(client, max_tokens=5, return_token_ids=True))["choices"]
    assert (choice["text"], choice["token_ids"]) == ("cdefg", [*b"cdefg"])
    assert choice["prompt_token_ids"] == [BOS, *b"ab"]


async def test_the_search_may_be_wider_than_what_is_told(client, engine: FakeEngine) -> None:
    answer = await ask(client, n=2, best_of=5, max_tokens=2)
    assert len(answer["choices"]) == 2
    assert engine.params[-1].logprobs == 10


async def test_chat_searches_too(client) -> None:
    answer = await ask(client, CHAT, n=2, max_tokens=3, logprobs=True, top_logprobs=2)
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        content = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in content) == choice["message"]["content"]
        assert [len(one["top_logprobs"]) for one in content] == [2, 2, 2]


async def test_the_end_of_the_text_ends_a_beam_unless_ignored(client) -> None:
    """After a full stop the end is likeliest by far; a strong penalty on length prefers it."""
    fields = {"prompt": "a.", "max_tokens": 4, "return_token_ids": True, "length_penalty": -1}
    best = (await ask(client, **fields))["choices"][0]
    assert (best["text"], best["finish_reason"], best["token_ids"]) == ("", "stop", [EOS])
    ignored = (await ask(client, **fields, ignore_eos=True))["choices"][0]
    assert (len(ignored["token_ids"]), ignored["finish_reason"]) == (4, "length")


async def test_length_penalty_decides_between_short_and_long(client) -> None:
    fields = {"prompt": "a.", "max_tokens": 12, "n": 2}
    short = (await ask(client, **fields, length_penalty=-2))["choices"][0]
    long = (await ask(client, **fields, length_penalty=5))["choices"][0]
    assert short["finish_reason"] == "stop" and len(short["text"]) == 0
    assert long["finish_reason"] == "length" and len(long["text"]) == 12


async def test_log_probabilities_are_as_many_as_asked(client) -> None:
    found = (await ask(client, n=2, max_tokens=2, logprobs=3))["choices"]
    assert [len(top) for top in found[0]["logprobs"]["top_logprobs"]] == [3, 3]
    none = (await ask(client, n=2, max_tokens=2))["choices"]
    assert [c["logprobs"] for c in none] == [None, None]


async def test_prompts_are_searched_side_by_side(client, engine: FakeEngine) -> None:
    answer = await ask(client, prompt=["a", "k"], n=2, max_tokens=2, cache_salt="mine", echo=True)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert [answer["choices"][i]["text"] for i in (0, 2)] == ["abc", "klm"]
    assert set(engine.salts) == {"mine"}
    assert len(set(engine.seen)) == len(engine.seen)
    assert not engine.running


async def test_neutral_values_of_sampling_fields_are_tolerated(client) -> None:
    await ask(
        client, max_tokens=1, temperature=1.0, top_p=1, top_k=-1, min_p=0, presence_penalty=0, frequency_penalty=0.0,
        repetition_penalty=1, seed=7, stop=[], stop_token_ids=[], logit_bias={}, bad_words=[], min_tokens=0,
        stream=False,
    )  # fmt: skip


async def test_the_models_sampling_defaults_are_no_obstacle(client, engine: FakeEngine) -> None:
    engine.default_params = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}
    response = await client.post(COMPLETIONS, json={"prompt": "ab", "use_beam_search": True, "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == "cd"


async def test_half_characters_become_whole_ones(client) -> None:
    assert (await ask(client, prompt="!", max_tokens=3))["choices"][0]["text"] == "éa"


async def test_a_failing_round_ends_the_request_with_an_error(client, engine: FakeEngine) -> None:
    engine.dead = RuntimeError("gone")
    response = await client.post(COMPLETIONS, json={"prompt": "ab", "use_beam_search": True})
    assert response.status_code == 503


async def test_a_caller_who_leaves_ends_every_beam(engine: FakeEngine) -> None:
    engine.delay = 0.01
    params = SamplingParams(n=3, max_tokens=500)
    fields = CompletionRequest(prompt="ab", n=3, use_beam_search=True)
    prompts = [Prompt([*b"ab"], "ab"), Prompt([*b"k"], "k")]
    reader = asyncio.create_task(collect(start(engine, Names("x", 0, "toy"), fields, prompts, [params, params]), 2))
    while len(engine.running) < 6:
        await asyncio.sleep(0.001)
    reader.cancel()
    await asyncio.wait([reader])
    assert reader.cancelled() and not engine.running and engine.aborted
