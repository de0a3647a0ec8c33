"""Around the app: a proxy's path, the count of requests at work, ids, the line for each request."""

from __future__ import annotations

import asyncio
import logging

import pytest

from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import CHAT, COMPLETIONS, HELLO

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("root", ["/llm", "/llm/"])
async def test_a_proxys_path_is_taken_away_before_keys_are_asked_for(root: str) -> None:
    async with client_of(make_service(FakeEngine(), api_key=("key",), root_path=root)) as client:
        for path, status in (("/llm/health", 200), ("/health", 200), ("/llm/v1/models", 401), ("/llm//health", 401)):
            assert (await client.get(path)).status_code == status
        for path in ("/llm/v1/models", "/v1/models"):
            assert (await client.get(path, headers={"Authorization": "Bearer key"})).status_code == 200
        for path in ("/llm/llm/v1/models", "/llmx/v1/models", "/llm"):
            assert (await client.get(path, headers={"Authorization": "Bearer key"})).status_code == 404


async def test_the_load_is_what_is_being_answered() -> None:
    engine = FakeEngine(delay=0.02)
    async with client_of(make_service(engine, enable_server_load_tracking=True)) as client:
        assert (await client.get("/load")).json() == {"server_load": 0}
        body = {"prompt": "a", "max_tokens": 10}
        running = [asyncio.create_task(client.post(COMPLETIONS, json=body | {"stream": s})) for s in (True, False)]
        while len(engine.running) < 2:
            await asyncio.sleep(0.002)
        assert (await client.get("/load")).json() == {"server_load": 2}
        await asyncio.gather(*running)
        await client.post(COMPLETIONS, json={})
        assert (await client.get("/load")).json() == {"server_load": 0}
    async with client_of(make_service(engine)) as client:
        assert (await client.get("/load")).status_code == 404


async def test_ping_is_health_by_another_name() -> None:
    async with client_of(make_service(None, api_key=("key",))) as client:
        for method in ("GET", "POST"):
            found = await client.request(method, "/ping")
            assert (found.status_code, found.json()["status"]) == (503, "loading")
    async with client_of(make_service(FakeEngine(), api_key=("key",))) as client:
        assert (await client.post("/ping")).status_code == 200


async def test_ids_can_be_kept_in() -> None:
    async with client_of(make_service(FakeEngine(), enable_request_id_headers=False)) as client:
        found = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
    assert "x-request-id" not in found.headers
    assert found.json()["id"] == "cmpl-abc"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("most", "shown"), [(None, False), (8, True)])
async def test_a_line_for_each_request(
    path: str, most: int | None, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server")
    body = {"prompt": "mysecrets", "messages": HELLO, "max_tokens": 7, "top_k": 3, "request_id": "my\nname"}
    async with client_of(make_service(FakeEngine(), enable_log_requests=True, max_log_len=most)) as client:
        assert (await client.post(path, json=body)).status_code == 200
    [line] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("request '")]
    assert "my\\nname" in line and "\n" not in line
    assert "max_tokens=7" in line and "top_k=3" in line
    assert ("mysec" in line or "<|user|" in line) is shown
    assert "mysecrets" not in line


async def test_no_line_unless_asked_for(client, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jaxserve.server")
    await client.post(COMPLETIONS, json={"prompt": "x"})
    assert not caplog.records


async def test_a_silent_stream_says_that_it_is_there() -> None:
    engine = FakeEngine(delay=0.1)
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0, "stream": True}
    async with client_of(make_service(engine, sse_keep_alive_interval=0.03)) as client:
        text = (await client.post(COMPLETIONS, json=body)).text
        refused = await client.post(COMPLETIONS, json=body | {"n": 0})
    events = [part for part in text.split("\n\n") if part]
    comments = [part for part in events if part.startswith(":")]
    assert len(comments) >= 5
    assert events[0] == comments[0] == ": still here"
    assert len([part for part in events if part.startswith("data: {")]) == 3
    assert events[-1] == "data: [DONE]"
    assert refused.status_code == 400
    assert not engine.aborted


async def test_a_failure_after_a_comment_is_an_event() -> None:
    engine = FakeEngine(delay=0.1)
    async with client_of(make_service(engine, sse_keep_alive_interval=0.03)) as client:
        asked = asyncio.create_task(client.post(COMPLETIONS, json={"prompt": "a", "stream": True}))
        await asyncio.sleep(0.05)
        engine.dead = RuntimeError("boom")
        answer = await asked
    assert answer.status_code == 200
    assert '"code":"engine_dead"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
