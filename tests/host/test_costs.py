"""What planning and committing a step costs, in calls: flat in all that is not in the step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import numpy as np

from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.host.sequence import Sequence
from jaxserve.plan import StepPlan, StepResult
from jaxserve.types import Request, SamplingParams

PAGE = 16


class Machine:
    """A scheduler whose device samples zeros."""

    def __init__(self, *, rows: int = 8, tokens: int = 256, pages: int = 400) -> None:
        self.scheduler = Scheduler(Limits(rows, tokens, PAGE, (pages,), (None,)))
        self.number = 0

    def add(self, prompt: list[int], most: int = 1000, salt: str = "") -> Sequence:
        self.number += 1
        params = SamplingParams(temperature=0, max_tokens=most)
        request = Request(str(self.number), tuple(prompt), params)
        s = Sequence(self.number, request, 0, 0, len(prompt) + most, frozenset(), salt=salt)
        self.scheduler.add(s)
        return s

    def step(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.commit(plan)

    def commit(self, plan: StepPlan) -> None:
        self.scheduler.commit(plan, StepResult(np.zeros(plan.emitting, np.int32), None, {}))

    def run(self) -> None:
        while not self.scheduler.idle:
            self.step()


def calls(action: Callable[[], object]) -> int:
    """Calls of functions, in Python or C, while `action` runs."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


def busy(*, rows: int = 8, pages: int = 400) -> Machine:
    """All rows but one are decoding."""
    m = Machine(rows=rows, pages=pages)
    for i in range(rows - 1):
        m.add([i] * 40)
    for _ in range(3):
        m.step()
    return m


def test_a_step_costs_the_same_however_many_wait_for_a_row() -> None:
    def cost(waiting: int) -> int:
        m = busy()
        for _ in range(waiting):
            m.add([1, 2, 3])
        m.step()
        return calls(m.step)

    assert cost(10_000) == cost(10)


def test_a_step_costs_the_same_however_many_wait_for_pages_and_however_long_they_are() -> None:
    def cost(waiting: int, length: int) -> int:
        m = busy()
        m.add([9] * 6200)
        m.step()
        for i in range(waiting):
            m.add([i] * length)
        m.step()
        assert m.scheduler.waiting == waiting + 1, "the first one does not fit"
        return calls(m.step)

    assert cost(10_000, 5) == cost(10, 5) == cost(10, 4000)


def test_a_head_that_finds_its_text_cached_is_not_looked_up_while_there_is_no_page() -> None:
    """All pages are held: what is cached cannot help, so that the length of a hit does not matter."""

    def cost(length: int) -> int:
        m = Machine(rows=4, pages=130)
        m.add([7] * length)
        m.add([1] * (2000 - length))
        while m.scheduler.pools[0].free > 1:
            m.step()
        m.add([7] * length)
        m.step()
        assert len(m.scheduler.running) == 2 and m.scheduler.waiting == 1
        return calls(m.step)

    assert cost(1600) == cost(160)


def test_those_who_step_aside_are_bounded_by_the_rows() -> None:
    """The end of a prompt is being computed, and all who wait begin with it."""

    def cost(waiting: int) -> int:
        m = Machine(rows=8, tokens=64)
        for _ in range(waiting):
            m.add([5] * 40)
        found = calls(m.step)
        assert len(m.scheduler.running) == 1 and m.scheduler.waiting == waiting - 1
        return found

    few, many = cost(100), cost(10_000)
    assert many <= few + 16 * 2 * 10, "a heap of ten thousand is a few levels deeper"


def test_a_step_costs_the_same_however_much_is_cached() -> None:
    def cost(pages: int, texts: int) -> int:
        m = Machine(rows=8, pages=pages)
        for i in range(texts):
            m.add([i % 60, i // 60] * 24, most=1)
        m.run()
        for i in range(7):
            m.add([61, i] * 20)
        for _ in range(3):
            m.step()
        assert m.scheduler.pools[0].cached >= 3 * texts
        return calls(m.step)

    assert cost(20_000, 3000) == cost(400, 30)


def test_a_step_costs_the_same_after_however_many_requests() -> None:
    def cost(before: int) -> int:
        m = Machine(rows=8, pages=100)
        for i in range(before):
            m.add([i % 60, i // 60, 1], most=2)
            if i % 50 == 0:
                m.run()
        m.run()
        for i in range(7):
            m.add([61, i] * 10)
        for _ in range(3):
            m.step()
        return calls(m.step)

    assert cost(5000) == cost(50)


def test_a_step_costs_in_proportion_to_its_rows() -> None:
    def cost(rows: int) -> int:
        m = busy(rows=rows, pages=2000)
        return calls(m.step)

    assert cost(65) <= 1.1 * 8 * cost(9)


def test_a_step_costs_the_same_however_long_its_sequences_are() -> None:
    def cost(length: int) -> int:
        m = Machine(rows=2, tokens=8000, pages=2000)
        m.add([3] * length)
        for _ in range(4):
            m.step()
        return calls(m.step)

    assert cost(7003) == cost(43)


def test_who_has_gone_is_not_kept() -> None:
    """Ten thousand who waited behind a long one leave; nothing of them stays in the queue."""
    m = Machine(rows=1)
    m.add([1] * 40)
    m.step()
    waiting = [m.add([2, 3]) for _ in range(10_000)]
    m.add([4])

    def leave() -> None:
        for s in waiting:
            m.scheduler.finish(s, "abort")

    assert calls(leave) < 12 * len(waiting)
    assert m.scheduler.waiting == 1 and len(m.scheduler._queue) <= 4
