"""The queue's limits: who is refused, what is told, and that nobody else notices."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from jaxserve.observe.metrics import Metrics
from server.app import build_app
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import CHAT, COMPLETIONS, HELLO, error_of

pytestmark = pytest.mark.anyio
BODY = {"prompt": "a", "max_tokens": 20, "temperature": 0}


def narrow(delay: float = 0.01, rows: int = 1) -> FakeEngine:
    engine = FakeEngine(delay=delay)
    engine.rows = rows
    return engine


async def until_running(engine: FakeEngine, count: int) -> None:
    async with asyncio.timeout(5):
        while len(engine.running) < count:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HELLO})])
async def test_a_full_queue_is_a_503_and_disturbs_nobody(path: str, prompt: dict, stream: bool) -> None:
    engine = narrow()
    async with client_of(make_service(engine, max_num_queued_reqs=1)) as client:
        inside = [asyncio.create_task(client.post(COMPLETIONS, json=BODY)) for _ in range(2)]
        await until_running(engine, 2)
        refused = await client.post(path, json=prompt | {"stream": stream})
        error = error_of(refused, 503)
        assert (error["type"], error["code"]) == ("service_unavailable", "queue_full")
        assert "--max-num-queued-reqs" in error["message"]
        assert refused.headers["retry-after"] == "1"
        answers = [await task for task in inside]
        assert {a.json()["choices"][0]["text"] for a in answers} == {"bcdefghijklmnopqrstu"}
        assert (await client.post(path, json=prompt | {"max_tokens": 1})).status_code == 200
    assert len(engine.seen) == 3
    assert not engine.aborted


async def test_every_prompt_and_every_choice_counts() -> None:
    engine = narrow()
    async with client_of(make_service(engine, max_num_queued_reqs=2)) as client:
        for many in ({"prompt": ["a"] * 4}, {"n": 4, "temperature": 1}, {"prompt": ["a", "b"], "n": 2}):
            assert error_of(await client.post(COMPLETIONS, json=BODY | many), 503)["code"] == "queue_full"
        assert not engine.seen, "no part of a refused request was begun"
        for few in ({"prompt": ["a"] * 3}, {"n": 3, "temperature": 1}):
            assert (await client.post(COMPLETIONS, json=BODY | few | {"max_tokens": 2})).status_code == 200


async def test_prompt_tokens_count_once_they_wait() -> None:
    engine = narrow()
    async with client_of(make_service(engine, max_num_queued_tokens=100)) as client:
        assert (await client.post(COMPLETIONS, json={"prompt": "x" * 500, "max_tokens": 1})).status_code == 200
        running = asyncio.create_task(client.post(COMPLETIONS, json=BODY))
        await until_running(engine, 1)
        waiting = asyncio.create_task(client.post(COMPLETIONS, json=BODY | {"prompt": "x" * 49}))
        await until_running(engine, 2)
        error = error_of(await client.post(COMPLETIONS, json=BODY | {"prompt": "x" * 50}), 503)
        assert "at most 100 prompt tokens may" in error["message"]
        last = await client.post(COMPLETIONS, json=BODY | {"prompt": "x" * 49, "max_tokens": 1})
        assert [r.status_code for r in (await running, await waiting, last)] == [200, 200, 200]


async def test_requests_that_come_together_do_not_slip_through() -> None:
    engine = narrow()
    async with client_of(make_service(engine, max_num_queued_reqs=4)) as client:
        posts = [client.post(COMPLETIONS, json=BODY | {"prompt": ["a", "b"]}) for _ in range(10)]
        codes = sorted([r.status_code for r in await asyncio.gather(*posts)])
    assert codes == [200] * 2 + [503] * 8
    assert len(engine.seen) == 4


async def test_without_limits_everything_waits() -> None:
    async with client_of(make_service(narrow(delay=0))) as client:
        posts = [client.post(COMPLETIONS, json=BODY) for _ in range(50)]
        assert {r.status_code for r in await asyncio.gather(*posts)} == {200}


async def test_refusals_are_counted_by_their_limit() -> None:
    service, metrics = make_service(narrow(), max_num_queued_tokens=1), Metrics("toy", "vllm")
    service.limits.on_refusal = metrics.on_refusal
    transport = httpx.ASGITransport(app=build_app(service, metrics.registry()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await client.post(COMPLETIONS, json=BODY | {"prompt": ["a", "b"]})
        shown = (await client.get("/metrics")).text
    labels = 'engine="0",model_name="toy"'
    assert f'vllm:admission_rejections_total{{{labels},reason="max_num_queued_tokens"}} 1.0' in shown
    assert f'vllm:admission_rejections_total{{{labels},reason="max_num_queued_reqs"}} 0.0' in shown
