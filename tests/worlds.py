"""An engine over the device that can be computed by hand, and a record of what its requests say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest

from jaxserve.deltas import Deltas
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Grammar
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.types import (
    Observer,
    Request,
    RequestOutput,
    RequestStats,
    SamplingParams,
    StepStats,
    StructuredOutputsParams,
)
from tests.fake_executor import FakeExecutor, Letters

BOUNDS = Bounds(
    max_model_len=200, vocab=64, max_logprobs=5, eos=(3,), priorities=True, seed=0, max_bad_tokens=16, max_banned=256
)


@dataclass
class World:
    """An engine over the fake device, and what its requests have said so far."""

    engine: Engine
    device: FakeExecutor
    outputs: list[RequestOutput] = field(default_factory=list)
    said: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        for out in outputs:
            self._note(out)
        return outputs

    def run(self, most: int = 10_000) -> int:
        steps = 0
        while self.engine.busy:
            self.step()
            steps += 1
            assert steps < most, "does not end"
        return steps

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar: Grammar | None = None,
        thinking_end: str | None = None,
        **params: object,
    ) -> None:
        p = SamplingParams(temperature=0).clone(**params)
        if grammar is not None:
            p = p.clone(structured_outputs=StructuredOutputsParams(regex="compiled already"))
        request = Request(name, tuple(prompt), p, None, priority, cache_salt, thinking_end=thinking_end)
        self.engine.check(request)
        self.engine.add(request, (), grammar)

    def abort(self, name: str) -> RequestOutput | None:
        last = self.engine.abort(name)
        if last is not None:
            self._note(last)
        return last

    def answer(self, name: str) -> RequestOutput:
        """All of its outputs so far, joined."""
        *before, last = [out for out in self.outputs if out.request_id == name]
        assert not any(out.finished for out in before), "says more after its end"
        return Deltas(*before, last).whole()

    def check(self) -> None:
        """free + held = all; every page is held as often as sequences have it; rows likewise."""
        s = self.engine.scheduler
        for group, pool in enumerate(s.pools):
            held = Counter(page for seq in s.running for page in seq.pages[group] if page)
            assert pool.free + len(held) == pool.total
            assert {page: pool._references[page] for page in held} == dict(held)
            assert pool.cached <= pool.total
        rows = [seq.row for seq in s.running]
        assert None not in rows and len(set(rows)) == len(rows)
        assert len(rows) + len(s._rows) == s.limits.rows
        assert s.running == sorted(s.running, key=lambda seq: seq.key)
        assert s.waiting == sum(seq.queued for seq in s._live.values())
        assert s.waiting_tokens == sum(seq.prompt_len for seq in s._live.values() if seq.queued)
        assert s.idle == (not s._live)
        assert s.unused_share() == pytest.approx(self._unused())

    def _unused(self) -> float:
        """Slot by slot: of the pages that are held, the share that holds no token."""
        s = self.engine.scheduler
        size = s.limits.page
        slots = {
            (group, page, i): at * size + i < seq.launched
            for seq in s.running
            for group, pages in enumerate(seq.pages)
            for at, page in enumerate(pages)
            if page
            for i in range(size)
        }
        return 1 - sum(slots.values()) / len(slots) if slots else 0.0

    def _note(self, out: RequestOutput) -> None:
        self.outputs.append(out)
        for choice in out.outputs:
            name = f"{out.request_id}.{choice.index}"
            self.said.setdefault(name, []).extend(choice.token_ids)
            if choice.finish_reason:
                assert name not in self.reasons, "ends twice"
                self.reasons[name] = choice.finish_reason


def world(
    *,
    rows: int = 4,
    tokens: int = 16,
    page: int = 4,
    pages: int = 40,
    depth: int = 2,
    caching: bool = True,
    chunked: bool = True,
    windows: tuple[int | None, ...] = (None,),
    observers: Iterable[Observer] = (),
) -> World:
    limits = Limits(rows, tokens, page, (pages,) * len(windows), windows, caching, chunked)
    device = FakeExecutor(page, windows, budget=tokens, rows=rows)
    engine = Engine(Scheduler(limits), device, Letters(), BOUNDS, depth=depth, observers=observers)
    return World(engine, device)


@dataclass
class Told:
    """An observer that keeps all."""

    steps: list[StepStats] = field(default_factory=list)
    ended: list[RequestStats] = field(default_factory=list)

    def on_step(self, step: StepStats) -> None:
        self.steps.append(step)

    def on_finish(self, request: RequestStats) -> None:
        self.ended.append(request)

    def on_recompile(self, seconds: float) -> None:
        raise AssertionError("nothing compiles here")
