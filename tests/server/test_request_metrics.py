"""`metrics` in answers, and usage in every stream: what two flags of the server add."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
PATHS = ["/v1/completions", "/v1/chat/completions"]
FOUR_TOKENS = {
    "time_to_first_token_ms": 500.0,
    "queue_time_ms": 250.0,
    "generation_time_ms": 625.0,
    "mean_itl_ms": 125.0,
    "tokens_per_second": 6.4,
}


@pytest.fixture
async def timed(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_service(engine, enable_per_request_metrics=True)) as found:
        yield found


@pytest.fixture
async def forced(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_service(engine, enable_force_include_usage=True)) as found:
        yield found


async def ask(client: httpx.AsyncClient, path: str, **fields: object) -> httpx.Response:
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    response = await client.post(path, json={"temperature": 0, "max_tokens": 4, **prompt, **fields})
    assert response.status_code == 200, response.text
    return response


async def chunks(client: httpx.AsyncClient, path: str, **fields: object) -> list[dict]:
    text = (await ask(client, path, stream=True, **fields)).text
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", PATHS)
async def test_an_answer_tells_how_long_it_took_if_the_server_is_told_to(client, timed, path: str) -> None:
    assert "metrics" not in (await ask(client, path)).json()
    assert (await ask(timed, path)).json()["metrics"] == FOUR_TOKENS


@pytest.mark.parametrize("path", PATHS)
async def test_one_token_has_no_gap(timed, path: str) -> None:
    assert (await ask(timed, path, max_tokens=1)).json()["metrics"]["mean_itl_ms"] is None


@pytest.mark.parametrize("path", PATHS)
async def test_the_gap_is_of_the_longest_choice_and_the_speed_of_all(timed, path: str) -> None:
    found = (await ask(timed, path, n=3)).json()["metrics"]
    assert (found["mean_itl_ms"], found["tokens_per_second"]) == (125.0, 19.2)


@pytest.mark.parametrize("path", PATHS)
async def test_a_streams_last_chunk_tells_it(timed, path: str) -> None:
    *before, last = await chunks(timed, path, n=2)
    assert last["metrics"] == {**FOUR_TOKENS, "tokens_per_second": 12.8}
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("metrics" in chunk for chunk in before)


@pytest.mark.parametrize("path", PATHS)
async def test_the_chunk_of_usage_tells_it_where_there_is_one(timed, path: str) -> None:
    *before, last = await chunks(timed, path, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["metrics"] == FOUR_TOKENS
    assert not any("metrics" in chunk for chunk in before)


async def test_several_prompts_end_with_one_record(timed) -> None:
    found = await chunks(timed, PATHS[0], prompt=["a", "k", "p"])
    assert ["metrics" in chunk for chunk in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["metrics"]["tokens_per_second"] == 19.2


@pytest.mark.parametrize("path", PATHS)
async def test_usage_can_be_forced_upon_every_stream(forced, path: str) -> None:
    *before, last = await chunks(forced, path)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in before)
    *before, last = await chunks(forced, path, stream_options={"include_usage": False, "continuous_usage_stats": True})
    assert last["choices"] == [] and all(chunk["usage"] for chunk in before)
