"""What a step of the whole engine costs, in calls: flat in all that is idle beside it."""

import pytest

from benchmarks.scaling import CASES, PAGE, Case, World, calls_of
from jaxserve.backlog import Backlog

SMALL = {
    "idle rows": (8, 4096),
    "pages in the pool": (400, 400_000),
    "requests waiting": (10, 10_000),
    "cached pages": (512, 20_000),
    "requests finished": (10, 2_000),
    "context of the others": (100, 10_000),
}


def calls(world: World) -> int:
    """Of as many steps as a page has tokens, so that every sequence begins one page."""
    for _ in range(PAGE):
        world.engine.step()
    return calls_of(lambda: [world.engine.step() for _ in range(PAGE)])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_step_costs_the_same_beside_whatever_is_idle(case: Case) -> None:
    few, many = SMALL[case.what]
    assert calls(case.at(many)) == pytest.approx(calls(case.at(few)), rel=0.01)


def test_a_step_costs_what_is_in_it() -> None:
    one, eight, fifteen = (calls(World(rows=15).decode(count)) for count in (1, 8, 15))
    assert fifteen - eight == pytest.approx(eight - one, rel=0.02)
    assert eight > 3 * one


def test_one_request_more_costs_the_same_however_many_were_posted() -> None:
    def cost(posted: int) -> int:
        backlog = Backlog(rows=3)
        for _ in range(posted):
            backlog.post(1, 5)
        assert backlog.with_more(1, 5) == (posted - 2, 5 * (posted - 2))
        return calls_of(lambda: backlog.with_more(1, 5))

    assert cost(10_000) == cost(10)
