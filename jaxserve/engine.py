"""One step of the engine: plan on the host, launch on the device, commit what came back.

The only room that sees both halves. Several steps are in flight: step N+1 is planned and launched while step N
runs, from upper bounds, with no token known yet (see docs/design).
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from jaxserve.host.answers import Answer, Vocabulary
from jaxserve.host.scheduler import Event, Scheduler
from jaxserve.host.sequence import Sequence
from jaxserve.plan import StepPlan, StepResult
from jaxserve.types import EngineDead, FinishReason, InvalidRequest, Observer, Request, RequestOutput, StepStats


class Flight(Protocol):
    """A launched step."""

    def read(self) -> StepResult:
        """Waits for the device."""
        ...


class Executor(Protocol):
    """The device half."""

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step and returns at once."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request may ask of this engine."""

    max_model_len: int
    vocab: int
    max_logprobs: int
    """-1: the whole vocabulary."""
    eos: tuple[int, ...]
    priorities: bool
    seed: int | None
    max_bad_tokens: int
    """Longest `bad_words` entry, in tokens."""
    max_banned: int
    """How many token sequences `bad_words` may become."""
    rope_length: Callable[[int], int] | None = None
    """With dynamic rope: the length that a prompt's keys are rotated for. Prompts of other lengths share no pages."""

    def salt(self, request: Request) -> str:
        """What keeps a request's prefix pages apart from others'."""
        salt = request.cache_salt or ""
        if self.rope_length is None:
            return salt
        return f"{self.rope_length(len(request.prompt_ids))}/{salt}"


class Engine:
    """Requests in, outputs out, a step at a time. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        vocabulary: Vocabulary,
        bounds: Bounds,
        *,
        depth: int = 2,
        observers: Iterable[Observer] = (),
    ) -> None:
        self.scheduler = scheduler
        self.bounds = bounds
        self._executor = executor
        self._vocabulary = vocabulary
        self._depth = depth
        self._observers = tuple(observers)
        self._flying: deque[tuple[StepPlan, Flight]] = deque()
        self._answers: dict[str, Answer] = {}
        self._numbers = itertools.count()
        self._seeds = itertools.count(bounds.seed) if bounds.seed is not None else None
        self._seen = (0, 0, 0, 0, 0)
        self._failure: BaseException | None = None
        self._at_close: list[Callable[[], None]] = []
        self.closed = False

    @property
    def busy(self) -> bool:
        """There is something to step."""
        return not self.scheduler.idle

    def check(self, request: Request) -> None:
        """Whether this engine can serve the request. Changes nothing; safe from any thread.

        Raises:
            InvalidRequest: it cannot; the message says why and `param` names the field.
        """
        _check(request, self.bounds)

    def add(self, request: Request, banned: tuple[tuple[int, ...], ...] = ()) -> None:
        """Takes a checked request in. `banned`: its bad words as token sequences."""
        if self._failure is not None:
            raise self._failure
        if request.id in self._answers:
            raise InvalidRequest(f"request_id {request.id!r} is in use by a running request", "request_id")
        p, b = request.params, self.bounds
        room = b.max_model_len - len(request.prompt_ids)
        seed = self._seed(p.seed)
        stops = frozenset(p.stop_token_ids or ()) | (frozenset() if p.ignore_eos else frozenset(b.eos))
        sequences = [
            Sequence(
                number=next(self._numbers),
                request=request,
                index=i,
                seed=(seed + i * 0x9E3779B97F4A7C15) % 2**64,
                limit=len(request.prompt_ids) + min(room, p.max_tokens or room),
                stop_ids=stops,
                banned=banned,
                salt=b.salt(request),
            )
            for i in range(p.n)
        ]
        self._answers[request.id] = Answer(request, sequences, self._vocabulary)
        for s in sequences:
            self.scheduler.add(s)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request; its rows and pages are free at once. Returns what was still unsaid of it.

        None for an unknown id: it may just have ended.
        """
        answer = self._answers.pop(request_id, None)
        if answer is None:
            return None
        for s in answer.sequences:
            self.scheduler.finish(s, "abort")
        self._tell_finished(answer, time.monotonic(), "abort")
        self._tell_step([], [])
        return answer.output()

    def step(self) -> list[RequestOutput]:
        """Launches the next step, if there is one, and reads the oldest one in flight, if it is time."""
        if self._failure is not None:
            raise self._failure
        plan = self.scheduler.plan()
        if plan is not None:
            self._flying.append((plan, self._launch(plan)))
            self._note_admissions(plan)
        if not self._flying or (plan is not None and len(self._flying) < self._depth):
            return []
        plan, flight = self._flying[0]
        result = flight.read()
        self._flying.popleft()
        now = time.monotonic()
        self._read_prompt_scores(plan, result)
        touched, first, gaps = self._read_tokens(self.scheduler.commit(plan, result), result, now)
        outputs = [answer.output() for answer in touched.values()]
        for answer in touched.values():
            if answer.finished:
                del self._answers[answer.request.id]
                self._tell_finished(answer, now, answer.sequences[0].finish_reason or "stop")
        self._tell_step(first, gaps)
        return outputs

    def close(self) -> None:
        """Frees the device memory. Requests that are running are dropped."""
        if self.closed:
            return
        self.closed = True
        self._failure = EngineDead("the engine is closed")
        for action in self._at_close:
            action()
        self._flying.clear()
        self._answers.clear()
        self._executor.close()

    def at_close(self, action: Callable[[], None]) -> None:
        """Runs `action` when the engine is closed."""
        self._at_close.append(action)

    def fail(self, error: BaseException) -> None:
        """The next step raises this. Safe from any thread."""
        self._failure = error

    def _launch(self, plan: StepPlan) -> Flight:
        """The scheduler counts on a plan that it made: one that cannot be launched is the end of the engine."""
        try:
            return self._executor.launch(plan)
        except BaseException as e:
            self.fail(e)
            raise

    def _note_admissions(self, plan: StepPlan) -> None:
        for admission in plan.admissions:
            s = self.scheduler.sequence(admission.sequence)
            if s is not None:
                self._answers[s.request.id].scheduled(time.monotonic())

    def _read_prompt_scores(self, plan: StepPlan, result: StepResult) -> None:
        for at, scores in result.prompt_scores.items():
            chunk = plan.chunks[at]
            s = self.scheduler.sequence(chunk.sequence)
            if s is not None and s.finish_reason is None and chunk.epoch == s.epoch:
                self._answers[s.request.id].scored(chunk.start, chunk.targets, scores)

    def _read_tokens(
        self, events: Seq[Event], result: StepResult, now: float
    ) -> tuple[dict[str, Answer], list[float], list[float]]:
        """Gives committed tokens to their answers; a stop string in their text ends the sequence."""
        touched: dict[str, Answer] = {}
        first: list[float] = []
        gaps: list[float] = []
        for event in events:
            s = event.sequence
            answer = self._answers[s.request.id]
            touched[s.request.id] = answer
            fresh = not answer.times.first_token
            piece, gap = answer.take(s.index, event.token, event.at, result.scores, now)
            if fresh:
                first.append(now - s.request.arrival)
            elif gap:
                gaps.append(gap)
            if piece.stop is not None:
                self._stop(s, piece.stop)
        return touched, first, gaps

    def _stop(self, s: Sequence, text: str) -> None:
        if s.finish_reason is None:
            self.scheduler.finish(s, "stop", text)
        else:
            s.finish_reason, s.stop_reason = "stop", text

    def _seed(self, given: int | None) -> int:
        if given is not None:
            return given % 2**64
        if self._seeds is not None:
            return next(self._seeds) * 0xD1342543DE82EF95 % 2**64
        return int.from_bytes(os.urandom(8), "little")

    def _tell_finished(self, answer: Answer, now: float, reason: FinishReason) -> None:
        for observer in self._observers:
            observer.on_finish(answer.stats(now, reason))

    def _tell_step(self, first: list[float], gaps: list[float]) -> None:
        if not self._observers:
            return
        c = self.scheduler.counts
        seen, self._seen = (
            self._seen,
            (c.prompt_tokens, c.generation_tokens, c.prefix_queries, c.prefix_hits, c.preemptions),
        )
        prompt, generated, queries, hits, preemptions = (new - old for new, old in zip(self._seen, seen, strict=True))
        pools = self.scheduler.pools
        stats = StepStats(
            running=len(self.scheduler.running),
            waiting=self.scheduler.waiting,
            pages_used=sum(pool.total - pool.free for pool in pools),
            pages_total=sum(pool.total for pool in pools),
            slots_unused=self.scheduler.unused_share(),
            prompt_tokens=prompt,
            generation_tokens=generated,
            prefix_queries=queries,
            prefix_hits=hits,
            preemptions=preemptions,
            first_token_seconds=tuple(first),
            inter_token_seconds=tuple(gaps),
        )
        for observer in self._observers:
            observer.on_step(stats)


def _check(request: Request, b: Bounds) -> None:
    p, count = request.params, len(request.prompt_ids)
    if not count:
        raise InvalidRequest("prompt must not be empty", "prompt")
    if count >= b.max_model_len:
        raise InvalidRequest(
            f"prompt has {count} tokens, but the context length is {b.max_model_len}, and one token at least must be "
            "left for the answer; shorten the prompt or raise --max-model-len",
            "prompt",
        )
    if request.priority and not b.priorities:
        raise InvalidRequest("priority needs --scheduling-policy priority", "priority")
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= 1024:
        raise InvalidRequest("cache_salt must have 1 to 1024 characters", "cache_salt")
    ids = {
        "prompt": request.prompt_ids,
        "stop_token_ids": p.stop_token_ids or (),
        "allowed_token_ids": p.allowed_token_ids or (),
        "logit_bias": p.logit_bias or (),
    }
    for name, tokens in ids.items():
        wrong = next((t for t in tokens if not 0 <= t < b.vocab), None)
        if wrong is not None:
            raise InvalidRequest(f"{name} has token id {wrong}, but ids must be in 0..{b.vocab - 1}", name)
    for name in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(p, name)
        if value is not None and b.max_logprobs >= 0 and not 0 <= value <= b.max_logprobs:
            raise InvalidRequest(f"{name} must be in 0..{b.max_logprobs} (--max-logprobs), got {value}", name)
