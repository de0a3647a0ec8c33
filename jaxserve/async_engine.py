"""The engine behind asyncio: one thread steps it, each request is an async generator of outputs.

Owns the thread, the inbox (add, abort) and one mailbox a request. A slow reader costs one merged output, not a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Protocol

from jaxserve.backlog import Backlog, Seen, Waiting
from jaxserve.deltas import Deltas
from jaxserve.engine import Bounds, Engine
from jaxserve.grammar.compile import Grammar
from jaxserve.prompts import Prompt, bad_word_tokens, tokens_of
from jaxserve.tokenizer import Tokenizer
from jaxserve.types import (
    EngineDead,
    InvalidRequest,
    OutputKind,
    Request,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

log = logging.getLogger(__name__)

COMPILE_SECONDS = 10
"""What a grammar may take, and those ahead of it."""


class Grammars(Protocol):
    """`grammar.compile.Compiler`, as far as it is used here."""

    def submit(self, asked: StructuredOutputsParams) -> Future[Grammar]: ...


class Served(Protocol):
    """What is served: `launch.Launched`, or anything of its shape."""

    @property
    def engine(self) -> Engine: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def grammars(self) -> Grammars: ...

    @property
    def default_params(self) -> Mapping[str, object]: ...


class _Mailbox:
    """What one request's reader has not taken yet. Touched by the event loop's thread only."""

    def __init__(self) -> None:
        self._waiting: RequestOutput | Deltas | None = None
        """One output as it came, which is the usual case, or several."""
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        """Done when there is something for the one who waits. A bare future: cheaper than an `asyncio.Event`."""

    def put(self, new: RequestOutput) -> None:
        match self._waiting:
            case None:
                self._waiting = new
            case Deltas():
                self._waiting.add(new)
            case _:
                self._waiting = Deltas(self._waiting, new)
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._wake()

    async def take(self) -> RequestOutput:
        """What has come since the last call, as one output; waits for it. An error comes after what was said."""
        if self._waiting is None and self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            assert self._error is not None
            raise self._error
        return waiting.whole() if isinstance(waiting, Deltas) else waiting

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class AsyncEngine:
    """An engine for many concurrent callers in one event loop.

    `generate` may be called from the loop that runs when the first request comes. Closing its generator, or
    cancelling the task that reads it, aborts the request.
    """

    def __init__(self, served: Served) -> None:
        self._engine = served.engine
        self.served = served
        self.tokenizer = served.tokenizer
        self.default_params = served.default_params
        self.dead: BaseException | None = None
        self._boxes: dict[str, _Mailbox] = {}
        """Of requests that are being read. The event loop's."""
        self._inside: dict[str, _Mailbox] = {}
        """Of requests that the engine has. The thread's: a name may be used again before the engine is done with it."""
        self._inbox: deque[Callable[[], object]] = deque()
        self._taken = 0
        """Requests that the engine was handed. The thread's."""
        self._backlog = Backlog(served.engine.scheduler.limits.rows)
        self._wake = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()

    @property
    def bounds(self) -> Bounds:
        return self._engine.bounds

    @property
    def max_model_len(self) -> int:
        return self._engine.bounds.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._engine.bounds.vocab

    @property
    def max_logprobs(self) -> int:
        return self._engine.bounds.max_logprobs

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text of this model."""
        return self._engine.bounds.eos

    @property
    def is_running(self) -> bool:
        return self.dead is None and not self._stopping

    @property
    def open_requests(self) -> int:
        """Requests whose readers wait."""
        return len(self._boxes)

    def waiting_with(self, sequences: int, tokens: int) -> Waiting:
        """What would wait for a row if so many sequences, with so many prompt tokens, came now."""
        return self._backlog.with_more(sequences, tokens)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        thinking_end: str | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Outputs of one request, as `params.output_kind` asks. `thinking_end`: that of `Request`.

        Raises:
            InvalidRequest: the request cannot be served; nothing has happened.
            EngineDead: the engine has failed.
        """
        arrival = time.monotonic()
        text, ids = tokens_of(prompt, self.tokenizer)
        request = Request(request_id, ids, params, text, priority, cache_salt, arrival, thinking_end)
        self._engine.check(request)
        banned = bad_word_tokens(params, self.tokenizer, self.bounds)
        asked = params.structured_outputs
        size = (params.n, params.n * len(request.prompt_ids))
        if not self.is_running:
            raise self._end()
        if request_id in self._boxes:
            raise InvalidRequest(f"request_id {request_id!r} is in use by a running request", "request_id")
        self._loop = asyncio.get_running_loop()
        box = self._boxes[request_id] = _Mailbox()
        finished = False
        sofar = Deltas()
        try:
            with self._backlog.coming(*size):
                grammar = None if asked is None else await self._compiled(asked)
            self._backlog.post(*size)
            self._post(lambda: self._add(request, banned, grammar, box))
            if not self.is_running:
                box.fail(self._end())
            while not finished:
                new = await box.take()
                finished = new.finished
                if params.output_kind is OutputKind.DELTA:
                    yield new
                    continue
                sofar.add(new)
                if finished or params.output_kind is OutputKind.CUMULATIVE:
                    yield sofar.whole()
        finally:
            self._boxes.pop(request_id, None)
            if not finished:
                self._post(lambda: self._drop(request_id))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its reader gets a last output with finish_reason 'abort'."""
        box = self._boxes.get(request_id)
        if box is not None:
            self._post(lambda: self._abort(request_id))

    async def drain(self, timeout: float) -> bool:
        """Waits until nothing runs, `timeout` seconds at most. Returns whether all ended by themselves."""
        until = time.monotonic() + timeout
        while self._boxes and self.dead is None and time.monotonic() < until:
            await asyncio.sleep(0.02)
        return not self._boxes

    def close(self) -> None:
        """Stops the thread and frees the device memory. Open requests fail with `EngineDead`."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    async def _compiled(self, asked: StructuredOutputsParams) -> Grammar:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self.served.grammars.submit(asked)), COMPILE_SECONDS)
        except TimeoutError:
            raise InvalidRequest(
                f"structured_outputs.{asked.kind} could not be compiled within {COMPILE_SECONDS} s; make it simpler",
                "structured_outputs",
            ) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.is_running or (task is not None and task.cancelling()):
                raise
            raise self._end() from None  # the compiler has dropped it, because the engine is closed

    def _post(self, action: Callable[[], object]) -> None:
        with self._wake:
            self._inbox.append(action)
            self._wake.notify()

    # -- in the engine's thread ---------------------------------------------------------------------------------

    def _add(
        self, request: Request, banned: tuple[tuple[int, ...], ...], grammar: Grammar | None, box: _Mailbox
    ) -> None:
        self._inside[request.id] = box
        self._taken += 1
        self._engine.add(request, banned, grammar)

    def _abort(self, request_id: str) -> None:
        last = self._engine.abort(request_id)
        if last is not None:
            self._deliver([last])

    def _drop(self, request_id: str) -> None:
        self._inside.pop(request_id, None)
        self._engine.abort(request_id)

    def _run(self) -> None:
        try:
            while self._wait():
                while self._inbox:
                    self._inbox.popleft()()
                outputs = self._engine.step()
                self._backlog.seen = self._seen()
                if outputs:
                    self._deliver(outputs)
        except BaseException as e:
            log.exception("the engine has failed; every open request ends with an error")
            self.dead = e
        error = self._end()
        self._in_loop(lambda: [box.fail(error) for box in self._boxes.values()])
        self._engine.close()

    def _seen(self) -> Seen:
        scheduler = self._engine.scheduler
        waiting = Waiting(scheduler.waiting, scheduler.waiting_tokens)
        return Seen(self._taken, waiting, scheduler.limits.rows - len(scheduler.running))

    def _wait(self) -> bool:
        """Until there is something to do; false when it is time to stop."""
        with self._wake:
            while not (self._inbox or self._engine.busy or self._stopping):
                self._wake.wait()
            return not self._stopping

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        """One call into the event loop a step, whatever the number of requests."""
        filled = [(self._inside[out.request_id], out) for out in outputs if out.request_id in self._inside]
        for _, out in filled:
            if out.finished:
                del self._inside[out.request_id]
        self._in_loop(lambda: [box.put(out) for box, out in filled])

    def _end(self) -> EngineDead:
        """Why nothing is served any more."""
        error = EngineDead(f"the engine is not running: {self.dead or 'it is shutting down'}")
        error.__cause__ = self.dead
        return error

    def _in_loop(self, action: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and its readers with it
                loop.call_soon_threadsafe(action)
