"""How much waits for a row: by hand, and in an engine whose device stands still."""

from __future__ import annotations

import asyncio

from jaxserve.backlog import Backlog, Seen, Waiting
from tests.test_async_engine import LONG, PROMPT, read, running, until, within


def test_requests_wait_once_the_rows_are_given() -> None:
    backlog = Backlog(rows=3)
    assert backlog.with_more(3, 30) == Waiting(0, 0)
    assert backlog.with_more(5, 50) == Waiting(2, 20)
    backlog.post(2, 8)
    assert backlog.with_more(2, 20) == Waiting(1, 10)
    backlog.post(2, 20)
    assert backlog.with_more(1, 7) == Waiting(2, 17)
    assert backlog.with_more(0, 0) == Waiting(1, 10)


def test_what_the_engine_has_taken_is_counted_by_the_engine() -> None:
    backlog = Backlog(rows=3)
    for _ in range(3):
        backlog.post(1, 5)
    backlog.seen = Seen(taken=2, waiting=Waiting(0, 0), free_rows=1)
    assert backlog.with_more(1, 5) == Waiting(1, 5)
    backlog.seen = Seen(taken=3, waiting=Waiting(2, 10), free_rows=1)
    assert backlog.with_more(1, 5) == Waiting(3, 15)
    backlog.post(1, 1)
    backlog.seen = Seen(taken=4, waiting=Waiting(0, 0), free_rows=2)
    assert backlog.with_more(2, 5) == Waiting(0, 0)


def test_a_request_that_is_not_posted_yet_counts() -> None:
    backlog = Backlog(rows=1)
    with backlog.coming(1, 9):
        assert backlog.with_more(1, 5) == Waiting(1, 5)
    assert backlog.with_more(1, 5) == Waiting(0, 0)


def test_an_engine_tells_what_waits() -> None:
    async def ask() -> None:
        with running(rows=2) as (front, served):
            served.device.gate.clear()
            tasks = [asyncio.create_task(read(front, LONG, str(i))) for i in range(4)]
            await asyncio.sleep(0)
            assert front.waiting_with(1, 3) == (3, 9)
            served.device.gate.set()
            await until(lambda: served.engine.scheduler.waiting == 2)
            assert front.waiting_with(1, 3) == (3, 9)
            await asyncio.gather(*tasks)
            await until(lambda: front.waiting_with(0, 0) == (0, 0))
            assert front.waiting_with(3, 3 * len(PROMPT)) == (1, 3)

    within(ask())


def test_a_request_that_leaves_the_queue_waits_no_more() -> None:
    async def ask() -> None:
        with running(rows=1) as (front, served):
            first, second = (asyncio.create_task(read(front, LONG, name)) for name in "ab")
            await until(lambda: served.engine.scheduler.waiting == 1)
            second.cancel()
            await until(lambda: front.waiting_with(0, 0) == (0, 0))
            assert served.engine.scheduler.waiting_tokens == 0
            await first

    within(ask())
