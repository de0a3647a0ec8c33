"""One step of the engine: plan on the host, launch on the device, commit what came back.

The only room that sees both halves. Several steps are in flight: step N+1 is planned and launched while step N
runs, from upper bounds, with no token known yet (see docs/design).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from jaxserve.grammar.compile import Grammar
from jaxserve.grammar.constraint import Constraint, Thinking, TokenMasks, certain, fill
from jaxserve.host.answers import Answer, Vocabulary
from jaxserve.host.scheduler import Scheduler
from jaxserve.host.sequence import Sequence
from jaxserve.plan import Choice, Chunk, Scores, StepPlan, StepResult
from jaxserve.types import EngineDead, FinishReason, InvalidRequest, Observer, Request, RequestOutput, StepStats


class Flight(Protocol):
    """A launched step."""

    def sample(self, choice: Choice | None = None) -> None:
        """Launches what ends the step. Later steps may be launched after it."""
        ...

    def read(self) -> StepResult:
        """Waits for the device. A step that was not sampled is, freely: it is only waited for then."""
        ...


class Executor(Protocol):
    """The device half."""

    def launch(self, plan: StepPlan) -> Flight:
        """Starts a step, up to sampling, and returns at once."""
        ...

    def close(self) -> None: ...


MOST_CERTAIN = 256
"""Tokens that are taken in unsampled in one step, over all sequences: each costs a mask, and all others wait."""


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
    constrain_thinking: bool = False
    """A request's constraint holds for its thinking too."""
    rope_length: Callable[[int], int] | None = None
    """With dynamic rope: the length that a prompt's keys are rotated for. Prompts of other lengths share no pages."""

    def salt(self, request: Request) -> str:
        """What keeps a request's prefix pages apart from others'."""
        salt = request.cache_salt or ""
        if self.rope_length is None:
            return salt
        return f"{self.rope_length(len(request.prompt_ids))}/{salt}"


@dataclass(slots=True)
class _Taken:
    """What one call of `step` has taken in."""

    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    first: list[float] = field(default_factory=list[float])
    """Seconds from arrival to first token."""
    gaps: list[float] = field(default_factory=list[float])
    now: float = 0.0
    """On the monotonic clock; 0.0: nothing was read."""


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
        self._unsampled = False
        """Of the latest one: whoever waited for the steps before it was interrupted."""
        self._answers: dict[str, Answer] = {}
        self._constraints: dict[int, Constraint] = {}
        """By sequence number; whoever may say anything has none."""
        self._numbers = itertools.count()
        self._seeds = itertools.count(bounds.seed) if bounds.seed is not None else None
        self._seen = (0, 0, 0, 0, 0)
        self._failure: BaseException | None = None
        self._at_close: list[Callable[[], None]] = []
        self._at_exit = functools.partial(_settle, self._flying)
        atexit.register(self._at_exit)
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

    def add(self, request: Request, banned: tuple[tuple[int, ...], ...] = (), grammar: Grammar | None = None) -> None:
        """Takes a checked request in, with its bad words as token sequences and its constraint, compiled."""
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
            constraint = Constraint(grammar, self._thinking(request))
            if not constraint.done:
                self._constraints[s.number] = constraint
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
        self._forget(answer, time.monotonic(), "abort")
        self._tell_step(_Taken())
        return answer.output()

    def step(self) -> list[RequestOutput]:
        """Launches the next step, if there is one, and reads the oldest one in flight, if it is time."""
        if self._failure is not None:
            raise self._failure
        taken = _Taken()
        started = self._unsampled or self._launch()
        if started:
            self._sample(taken)
        if self._flying and (not started or len(self._flying) >= self._depth):
            self._land(taken)
        outputs = [answer.output() for answer in taken.answers.values()]
        for answer in taken.answers.values():
            if answer.finished:
                del self._answers[answer.request.id]
                self._forget(answer, taken.now, answer.sequences[0].finish_reason or "stop")
        if taken.now:
            self._tell_step(taken)
        return outputs

    def close(self) -> None:
        """Frees the device memory. Requests that are running are dropped."""
        if self.closed:
            return
        self.closed = True
        self._failure = EngineDead("the engine is closed")
        for action in self._at_close:
            action()
        _settle(self._flying)
        atexit.unregister(self._at_exit)
        self._answers.clear()
        self._executor.close()

    def at_close(self, action: Callable[[], None]) -> None:
        """Runs `action` when the engine is closed."""
        self._at_close.append(action)

    def fail(self, error: BaseException) -> None:
        """The next step raises this. Safe from any thread."""
        self._failure = error

    def _launch(self) -> bool:
        """Starts the next step, if there is one."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        with self._or_fail():
            self._flying.append((plan, self._executor.launch(plan)))
            self._unsampled = True
            self._note_admissions(plan)
        return True

    def _sample(self, taken: _Taken) -> None:
        """Ends the latest step. If it may not say just anything, the steps before it are read while it computes."""
        plan, flight = self._flying[-1]
        constrained = any(chunk.sequence in self._constraints for chunk in plan.chunks[: plan.emitting])
        while constrained and len(self._flying) > 1:
            self._land(taken)
        with self._or_fail():
            flight.sample(self._choose(plan, taken) if constrained else None)
        self._unsampled = False

    @contextlib.contextmanager
    def _or_fail(self) -> Generator[None]:
        """The scheduler counts on a plan that it made: one that cannot be carried out is the end of the engine."""
        try:
            yield
        except BaseException as e:
            self.fail(e)
            raise

    def _choose(self, plan: StepPlan, taken: _Taken) -> Choice:
        """What the chunks of a step may say; every token before them has been read.

        Where only one token may follow it is taken in at once, and so on after it: they are computed together in the
        next step, or in the ones after it if they are many. Not where log probabilities are wanted, which only
        sampling gives.
        """
        masks = np.full((plan.emitting, -(-self.bounds.vocab // 32)), -1, np.int32)
        settled: set[int] = set()
        bound: list[tuple[int, Sequence, Constraint]] = []
        for at, chunk in enumerate(plan.chunks[: plan.emitting]):
            s = self.scheduler.sequence(chunk.sequence)
            if s is None or s.finish_reason is not None or s.epoch != chunk.epoch:
                settled.add(at)
            elif s.number in self._constraints:
                bound.append((at, s, self._constraints[s.number]))
        fill([(at, constraint) for at, _, constraint in bound], masks)
        left = MOST_CERTAIN
        for at, s, constraint in bound:
            if _may_jump(s, plan.chunks[at]):
                count = self._jump(s, constraint, masks, at, left, taken)
                left -= count
                if count:
                    settled.add(at)
        return Choice(masks, frozenset(settled))

    def _jump(self, s: Sequence, constraint: Constraint, masks: TokenMasks, at: int, most: int, taken: _Taken) -> int:
        """Takes in the tokens that are certain, `most` of them; how many there were."""
        count = 0
        while count < most and s.finish_reason is None and (token := certain(masks, at)) is not None:
            count += 1
            self.scheduler.force(s, token)
            self._take(s, token, 0, None, taken)
            masks[at] = -1
            constraint.fill(masks, at)
        return count

    def _land(self, taken: _Taken) -> None:
        """Reads the oldest step in flight."""
        plan, flight = self._flying[0]
        result = flight.read()
        self._flying.popleft()
        taken.now = time.monotonic()
        self._read_prompt_scores(plan, result)
        for event in self.scheduler.commit(plan, result):
            self._take(event.sequence, event.token, event.at, result.scores, taken)

    def _take(self, s: Sequence, token: int, at: int, scores: Scores | None, taken: _Taken) -> None:
        """Gives a committed token to its answer; a stop string in its text ends the sequence."""
        answer = taken.answers[s.request.id] = self._answers[s.request.id]
        taken.now = taken.now or time.monotonic()
        constraint = self._constraints.get(s.number)
        if constraint is not None:
            if not constraint.accept(token):
                self._end(s, "error", "structured_outputs: nothing that may follow was left to say")
                return
            if constraint.done:
                del self._constraints[s.number]
        fresh = not answer.first_token
        piece, gap = answer.take(s.index, token, at, scores, taken.now)
        if fresh:
            taken.first.append(taken.now - s.request.arrival)
        elif gap:
            taken.gaps.append(gap)
        if piece.stop is not None:
            self._end(s, "stop", piece.stop)

    def _end(self, s: Sequence, reason: FinishReason, why: str) -> None:
        if s.finish_reason is None:
            self.scheduler.finish(s, reason, why)
        else:
            s.finish_reason, s.stop_reason = reason, why

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

    def _thinking(self, request: Request) -> Thinking | None:
        """The time before a request's constraint begins, if there is one and it matters."""
        p, end = request.params, request.thinking_end
        if not end or (p.structured_outputs is None and p.thinking_token_budget is None):
            return None
        if p.structured_outputs is not None and self.bounds.constrain_thinking:
            return None
        words = self._vocabulary
        return Thinking(end, tuple(words.encode(end, False)), words.token_bytes, p.thinking_token_budget)

    def _seed(self, given: int | None) -> int:
        if given is not None:
            return given % 2**64
        if self._seeds is not None:
            return next(self._seeds) * 0xD1342543DE82EF95 % 2**64
        return int.from_bytes(os.urandom(8), "little")

    def _forget(self, answer: Answer, now: float, reason: FinishReason) -> None:
        for s in answer.sequences:
            self._constraints.pop(s.number, None)
        for observer in self._observers:
            observer.on_finish(answer.stats(now, reason))

    def _tell_step(self, taken: _Taken) -> None:
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
            first_token_seconds=tuple(taken.first),
            inter_token_seconds=tuple(taken.gaps),
        )
        for observer in self._observers:
            observer.on_step(stats)


def _settle(flying: deque[tuple[StepPlan, Flight]]) -> None:
    """Waits for steps whose results nobody wants: a process that ends under a device at work is aborted."""
    while flying:
        with contextlib.suppress(Exception):
            flying.popleft()[1].read()


def _may_jump(s: Sequence, chunk: Chunk) -> bool:
    """Whether tokens of `s` that are certain need not be sampled: nobody asks what the model thinks of them."""
    p = s.request.params
    return p.logprobs is None and not chunk.targets and p.allowed_token_ids is None and not s.banned


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
    if p.thinking_token_budget is not None and not request.thinking_end:
        raise InvalidRequest(
            "thinking_token_budget needs a model that thinks, and a --reasoning-parser", "thinking_token_budget"
        )
    if p.thinking_token_budget is not None and p.structured_outputs is not None and b.constrain_thinking:
        raise InvalidRequest(
            "thinking_token_budget cannot be kept where structured_outputs hold for the thinking too: leave one out, "
            "or start without enable_in_reasoning",
            "thinking_token_budget",
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
