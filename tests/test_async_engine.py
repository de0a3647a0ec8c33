"""`AsyncEngine` over a device that can be computed by hand: streams, aborts, slow readers, failures, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import pytest

from jaxserve import async_engine
from jaxserve.async_engine import AsyncEngine
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Grammar
from jaxserve.grammar.constraint import Constraint
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.plan import StepPlan
from jaxserve.types import (
    EngineDead,
    InvalidRequest,
    OutputKind,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.fake_executor import VOCAB, FakeExecutor, FakeFlight, Letters, continuation
from tests.grammar.vocabulary import constrained, grammar
from tests.worlds import Told

PROMPT = [5, 9, 13]
SHORT = SamplingParams(max_tokens=6)
LONG = SamplingParams(max_tokens=400, output_kind=OutputKind.DELTA)


class Device(FakeExecutor):
    """Steps while its gate is open; breaks on demand."""

    def __init__(self) -> None:
        super().__init__(4)
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.closed = False

    def launch(self, plan: StepPlan) -> FakeFlight:
        self.gate.wait(10)
        time.sleep(0.0005)
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().launch(plan)

    def close(self) -> None:
        super().close()
        self.closed = True


class Compiling:
    """Grammars that are ready when a test says so."""

    def __init__(self) -> None:
        self.asked: list[Future[Grammar]] = []

    def submit(self, asked: StructuredOutputsParams) -> Future[Grammar]:
        self.asked.append(Future())
        return self.asked[-1]


@dataclass(frozen=True)
class Served:
    engine: Engine
    device: Device
    watcher: Told
    tokenizer: Letters = field(default_factory=Letters)
    names: tuple[str, ...] = ("letters",)
    default_params: dict[str, object] = field(default_factory=dict)
    grammars: Compiling = field(default_factory=lambda: Compiling())

    def empty(self) -> bool:
        """Nothing runs or waits, and every page came home."""
        scheduler = self.engine.scheduler
        return scheduler.idle and not scheduler.running and all(pool.free == pool.total for pool in scheduler.pools)


@contextmanager
def running(*, depth: int = 2, rows: int = 4) -> Iterator[tuple[AsyncEngine, Served]]:
    device, watcher = Device(), Told()
    limits = Limits(rows=rows, tokens=32, page=4, pages=(512,), windows=(None,))
    bounds = Bounds(
        max_model_len=1000,
        vocab=VOCAB,
        max_logprobs=5,
        eos=(),
        priorities=False,
        seed=0,
        max_bad_tokens=4,
        max_banned=8,
    )
    engine = Engine(Scheduler(limits), device, Letters(), bounds, depth=depth, observers=(watcher,))
    served = Served(engine, device, watcher)
    front = AsyncEngine(served)
    try:
        yield front, served
    finally:
        device.gate.set()
        front.close()


async def read(
    front: AsyncEngine, params: SamplingParams, name: str = "r", prompt: list[int] | None = None
) -> list[RequestOutput]:
    return [out async for out in front.generate(prompt or PROMPT, params, name)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.002)


def within[T](work: Awaitable[T], seconds: float = 10) -> T:
    async def timed() -> T:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(timed())


def test_a_stream_of_deltas_is_the_answer() -> None:
    with running() as (front, served):
        outputs = within(read(front, SHORT.clone(output_kind=OutputKind.DELTA)))
        assert [t for out in outputs for t in out.outputs[0].token_ids] == continuation(PROMPT, 6)
        assert [out.finished for out in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].outputs[0].finish_reason == "length"
        assert served.empty()


def test_cumulative_outputs_grow_to_the_final_one() -> None:
    with running() as (front, _):
        outputs = within(read(front, SHORT.clone(output_kind=OutputKind.CUMULATIVE)))
        [final] = within(read(front, SHORT.clone(output_kind=OutputKind.FINAL_ONLY), "final"))
    whole = continuation(PROMPT, 6)
    seen = [list(out.outputs[0].token_ids) for out in outputs]
    assert all(tokens == whole[: len(tokens)] for tokens in seen)
    assert [len(tokens) for tokens in seen] == sorted({len(tokens) for tokens in seen})
    assert seen[-1] == whole == list(final.outputs[0].token_ids)
    assert outputs[-1].outputs[0].text == final.outputs[0].text == "".join(chr(ord("0") + t) for t in whole)


@pytest.mark.parametrize("kind", OutputKind)
def test_every_choice_of_n_arrives(kind: OutputKind) -> None:
    with running() as (front, _):
        outputs = within(read(front, SHORT.clone(n=3, output_kind=kind)))
    told = outputs if kind is OutputKind.DELTA else outputs[-1:]
    for index in range(3):
        pieces = [c for out in told for c in out.outputs if c.index == index]
        assert [t for piece in pieces for t in piece.token_ids] == continuation(PROMPT, 6)
        assert pieces[-1].finish_reason == "length"


def test_many_at_once_get_their_own_answers() -> None:
    async def all_of_them(front: AsyncEngine) -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(front, SHORT, f"r{i}", [i, i + 1]) for i in range(20)))

    with running() as (front, served):
        for i, outputs in enumerate(within(all_of_them(front))):
            assert list(outputs[-1].outputs[0].token_ids) == continuation([i, i + 1], 6)
        assert served.empty()
        assert served.watcher.steps[-1].running == served.watcher.steps[-1].pages_used == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_closing_the_generator_ends_the_request(depth: int) -> None:
    async def leave(front: AsyncEngine, served: Served) -> None:
        async with aclosing(front.generate(PROMPT, LONG, "r")) as outputs:
            async for _ in outputs:
                break
        assert front.open_requests == 0
        await until(served.empty)

    with running(depth=depth) as (front, served):
        within(leave(front, served))
        assert [r.finish_reason for r in served.watcher.ended] == ["abort"]
        last = served.watcher.steps[-1]
        assert (last.running, last.waiting, last.pages_used) == (0, 0, 0)
        assert list(within(read(front, SHORT, "r"))[-1].outputs[0].token_ids) == continuation(PROMPT, 6)


def test_cancelling_the_task_that_reads_ends_the_request() -> None:
    async def cancel(front: AsyncEngine, served: Served) -> None:
        served.device.gate.clear()
        tasks = [asyncio.create_task(read(front, LONG, f"r{i}")) for i in range(8)]
        await until(lambda: front.open_requests == 8)
        served.device.gate.set()
        await until(lambda: len(served.device.steps) > 3)
        for task in tasks:
            task.cancel()
        assert all(isinstance(e, asyncio.CancelledError) for e in await asyncio.gather(*tasks, return_exceptions=True))
        await until(served.empty)

    with running() as (front, served):
        within(cancel(front, served))
        last = served.watcher.steps[-1]
        assert (last.running, last.waiting, last.pages_used) == (0, 0, 0)


def test_abort_tells_the_reader() -> None:
    async def told(front: AsyncEngine) -> list[RequestOutput]:
        reading = asyncio.create_task(read(front, LONG))
        await until(lambda: front.open_requests == 1)
        await front.abort("r")
        await front.abort("nobody")
        return await reading

    with running() as (front, served):
        outputs = within(told(front))
        assert outputs[-1].finished
        assert outputs[-1].outputs[0].finish_reason == "abort"
        within(until(served.empty))


def test_a_slow_reader_gets_one_merged_output() -> None:
    async def slow(front: AsyncEngine, served: Served) -> list[RequestOutput]:
        async with aclosing(front.generate(PROMPT, LONG.clone(max_tokens=50), "r")) as stream:
            found = [await anext(stream)]
            await until(served.empty)
            await asyncio.sleep(0.02)
            return found + [out async for out in stream]

    with running() as (front, served):
        outputs = within(slow(front, served))
    assert len(outputs) == 2
    assert [t for out in outputs for t in out.outputs[0].token_ids] == continuation(PROMPT, 50)


def test_a_failure_reaches_every_reader() -> None:
    async def fail(front: AsyncEngine, served: Served) -> list[list[RequestOutput] | BaseException]:
        reading = [asyncio.create_task(read(front, LONG, f"r{i}")) for i in range(8)]
        await until(lambda: len(served.device.steps) > 3)
        served.device.broken = True
        return await asyncio.gather(*reading, return_exceptions=True)

    with running() as (front, served):
        for found in within(fail(front, served)):
            assert isinstance(found, EngineDead)
            assert "the device is gone" in str(found)
        assert isinstance(front.dead, RuntimeError)
        assert not front.is_running
        with pytest.raises(EngineDead):
            within(read(front, SHORT, "later"))
        front.close()
        assert served.device.closed


def test_a_failure_before_the_first_output_reaches_its_reader() -> None:
    with running() as (front, served):
        served.device.broken = True
        with pytest.raises(EngineDead):
            within(read(front, SHORT))


@pytest.mark.parametrize(
    ("prompt", "changes", "param"),
    [
        ([], {}, "prompt"),
        ([VOCAB], {}, "prompt"),
        ([1] * 1000, {}, "prompt"),
        ([1.5], {}, "prompt"),
        ({"text": "a"}, {}, "prompt"),
        (PROMPT, {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        (PROMPT, {"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
        (PROMPT, {"stop_token_ids": [VOCAB]}, "stop_token_ids"),
        (PROMPT, {"logprobs": 6}, "logprobs"),
        (PROMPT, {"bad_words": ["a b c d e"]}, "bad_words"),
        (PROMPT, {"bad_words": ["x" * 1_000_000]}, "bad_words"),
        (PROMPT, {"bad_words": [f"{i}" for i in range(9)]}, "bad_words"),
    ],
)
def test_an_invalid_request_changes_nothing(prompt: list[int], changes: dict[str, object], param: str) -> None:
    with running() as (front, served):
        with pytest.raises(InvalidRequest) as refused:
            within(read(front, SHORT.clone(**changes), prompt=prompt) if prompt else _empty(front))
        assert refused.value.param == param
        assert front.open_requests == 0
        assert served.device.steps == []
        assert list(within(read(front, SHORT))[-1].outputs[0].token_ids) == continuation(PROMPT, 6)


async def _empty(front: AsyncEngine) -> list[RequestOutput]:
    return [out async for out in front.generate([], SHORT, "r")]


def test_priority_and_salt_are_checked() -> None:
    async def ask(front: AsyncEngine, **more: object) -> None:
        async for _ in front.generate(PROMPT, SHORT, "r", **more):  # type: ignore[arg-type]
            pass

    with running() as (front, _):
        for more, param in (({"priority": 1}, "priority"), ({"cache_salt": ""}, "cache_salt")):
            with pytest.raises(InvalidRequest) as refused:
                within(ask(front, **more))
            assert refused.value.param == param


def test_a_name_in_use_is_refused_and_free_again_afterwards() -> None:
    async def twice(front: AsyncEngine, served: Served) -> None:
        async with aclosing(front.generate(PROMPT, LONG, "same")) as first:
            await anext(first)
            with pytest.raises(InvalidRequest, match="in use"):
                await read(front, SHORT, "same")
            await anext(first)
        assert list((await read(front, SHORT, "same"))[-1].outputs[0].token_ids) == continuation(PROMPT, 6)
        assert served.empty()

    with running() as (front, served):
        within(twice(front, served))


def test_close_ends_open_requests() -> None:
    async def close(front: AsyncEngine, served: Served) -> list[list[RequestOutput] | BaseException]:
        reading = [asyncio.create_task(read(front, LONG, f"r{i}")) for i in range(3)]
        await until(lambda: len(served.device.steps) > 3)
        await asyncio.to_thread(front.close)
        return await asyncio.gather(*reading, return_exceptions=True)

    with running() as (front, served):
        assert all(isinstance(found, EngineDead) for found in within(close(front, served)))
        assert front.dead is None
        assert not front.is_running
        assert served.device.closed
        with pytest.raises(EngineDead, match="shutting down"):
            within(read(front, SHORT))
        front.close()


def test_drain_waits_for_the_last_request() -> None:
    async def drain(front: AsyncEngine, served: Served) -> tuple[bool, bool, list[RequestOutput]]:
        served.device.gate.clear()
        reading = asyncio.create_task(read(front, SHORT))
        await until(lambda: front.open_requests == 1)
        early = await front.drain(0.05)
        served.device.gate.set()
        return early, await front.drain(5), await reading

    with running() as (front, served):
        early, late, outputs = within(drain(front, served))
    assert (early, late) == (False, True)
    assert outputs[-1].finished


SHAPED = SHORT.clone(structured_outputs=StructuredOutputsParams(regex="compiled by the test"))


def idle(front: AsyncEngine, served: Served) -> bool:
    return front.open_requests == 0 and served.empty() and front.waiting_with(0, 0) == (0, 0)


def test_a_request_starts_when_its_grammar_is_compiled_and_counts_before() -> None:
    async def wait(front: AsyncEngine, served: Served) -> list[RequestOutput]:
        reading = asyncio.create_task(read(front, SHAPED.clone(n=6)))
        await until(lambda: bool(served.grammars.asked))
        assert front.waiting_with(0, 0) == (2, 2 * len(PROMPT)), "four of the six would have rows"
        assert not served.device.steps
        assert not await front.drain(0.01), "whoever stops the server waits for it"
        with pytest.raises(InvalidRequest, match="in use"):
            await read(front, SHORT)
        served.grammars.asked[0].set_result(g)
        outputs = await reading
        await until(lambda: idle(front, served))
        return outputs

    g = grammar("start: /[a-f]{6}/")
    with running() as (front, served):
        outputs = within(wait(front, served))
    assert list(outputs[-1].outputs[5].token_ids) == constrained(PROMPT, 6, Constraint(g))


def test_a_request_that_is_cancelled_while_its_grammar_compiles_leaves_nothing() -> None:
    async def cancel(front: AsyncEngine, served: Served) -> None:
        reading = asyncio.create_task(read(front, SHAPED))
        await until(lambda: bool(served.grammars.asked))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert served.grammars.asked[0].cancelled()
        assert idle(front, served)
        assert (await read(front, SHORT))[-1].finished

    with running() as (front, served):
        within(cancel(front, served))


def test_a_grammar_that_takes_too_long_or_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(front: AsyncEngine, served: Served) -> None:
        monkeypatch.setattr(async_engine, "COMPILE_SECONDS", 0.01)
        with pytest.raises(InvalidRequest, match="could not be compiled within"):
            await read(front, SHAPED)
        monkeypatch.undo()
        reading = asyncio.create_task(read(front, SHAPED))
        await until(lambda: len(served.grammars.asked) == 2)
        served.grammars.asked[1].set_exception(InvalidRequest("wrong", "structured_outputs"))
        with pytest.raises(InvalidRequest, match="wrong"):
            await reading
        assert idle(front, served)

    with running() as (front, served):
        within(refused(front, served))


def test_an_engine_that_ends_while_a_grammar_compiles_says_so() -> None:
    """The compiler drops what it has not begun: that must not look as if the reader had gone."""

    async def close(front: AsyncEngine, served: Served) -> None:
        reading = asyncio.create_task(read(front, SHAPED))
        await until(lambda: bool(served.grammars.asked))
        await asyncio.to_thread(front.close)
        served.grammars.asked[0].cancel()
        with pytest.raises(EngineDead, match="shutting down"):
            await reading
        with pytest.raises(EngineDead, match="shutting down"):
            await read(front, SHAPED)
        assert len(served.grammars.asked) == 1, "a compiler that is closed takes nothing"

    with running() as (front, served):
        within(close(front, served))
