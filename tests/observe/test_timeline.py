"""The timeline of a start, there and back."""

from __future__ import annotations

import time

import pytest

from jaxserve.observe.timeline import Timeline, read


def test_what_is_told_is_read() -> None:
    timeline = Timeline()
    with timeline.phase("all"), timeline.phase("a part"):
        time.sleep(0.02)
    told = read(f"10:00 INFO jaxserve: {timeline}")
    assert told is not None and [phase.name for phase in told.phases] == ["all", "a part"]
    assert all(phase.end - phase.begin >= 0.01 for phase in told.phases)
    assert told.cpu == pytest.approx(time.process_time(), abs=0.5)


def test_other_lines_hold_none() -> None:
    assert read("10:00 INFO jaxserve: KV pool: 3 pages") is None
