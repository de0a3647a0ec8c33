"""Who computes how many tokens in the next step. A function of ordered events: add, abort, plan, commit, finish.

Owns every sequence, row and page. Reads no clock, draws no random number, knows no text: replaying the events
gives the same plans.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from jaxserve.host.pages import PagePool, Parent
from jaxserve.host.sequence import Sequence
from jaxserve.plan import Admission, Chunk, PageEntry, StepPlan, StepResult
from jaxserve.types import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and the engine can hold."""

    rows: int
    tokens: int
    """Token budget of a step."""
    page: int
    pages: tuple[int, ...]
    """Pool size per cache group, the scratch page included."""
    windows: tuple[int | None, ...]
    """Per cache group: how far back a token looks, if not to the beginning."""
    caching: bool = True
    chunked: bool = True


class Event(Struct, frozen=True):
    """A committed token. `at` is the chunk's place among the step's emitting chunks."""

    sequence: Sequence
    token: int
    at: int


@dataclass(slots=True)
class Counts:
    """What happened since the start; only ever grows."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class _Draft:
    """A plan while it is being made."""

    budget: int
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    admissions: list[Admission] = field(default_factory=list[Admission])
    entries: list[PageEntry] = field(default_factory=list[PageEntry])
    planned: list[Sequence] = field(default_factory=list[Sequence])


class Scheduler:
    """Continuous batching without phases.

    Each sequence has tokens launched and tokens known; a step hands out its token budget until the two meet, first
    to the running sequences in order of service, then to waiting ones. A sequence that meets its known tokens
    samples one more. Chunked prefill, prefix hits, recomputation after a preemption and mixed steps are all that
    one sentence.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counts = Counts()
        self.pools = [PagePool(n, limits.page, caching=limits.caching) for n in limits.pages]
        self.running: list[Sequence] = []
        """Sequences that hold a row, in order of service."""
        self._queue: list[tuple[tuple[int, int], Sequence]] = []
        """A heap; ended sequences stay for a while."""
        self._waiting = 0
        self._waiting_tokens = 0
        self._live: dict[int, Sequence] = {}
        self._rows = list(range(limits.rows))[::-1]
        self._step = 0
        self._watermark = max(1, min(limits.pages) // 100)
        self._windowed = any(window is not None for window in limits.windows)

    @property
    def waiting(self) -> int:
        """Sequences without a row that have not ended."""
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        """Tokens of their prompts."""
        return self._waiting_tokens

    @property
    def idle(self) -> bool:
        """Nothing to plan and nothing to commit."""
        return not self._live

    def sequence(self, number: int) -> Sequence | None:
        return self._live.get(number)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.limits.page)

    def add(self, s: Sequence) -> None:
        """A new sequence joins the queue. The caller has checked that it fits an empty engine."""
        s.tokens = list(s.request.prompt_ids)
        self._live[s.number] = s
        self._enqueue(s)

    def finish(self, s: Sequence, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends a sequence now: its row and pages are free at once, what is in flight for it will be dropped."""
        if s.finish_reason is not None:
            return
        s.finish_reason, s.stop_reason = reason, stop_reason
        if s.row is not None:
            self._leave(s)
        elif s.queued:
            self._dequeue(s)
            self._sweep()
        if s.pending == 0:
            self._live.pop(s.number, None)

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing to compute. Launch it: the scheduler counts on it."""
        draft = _Draft(budget=self.limits.tokens)
        self._continue_running(draft)
        if self._waiting and draft.budget and self._rows:
            self._admit_waiting(draft)
        if not draft.chunks:
            return None
        for s in draft.planned:
            self._publish(s)
            if self._windowed:
                self._drop_behind_window(s)
            if s.known >= s.limit:
                self._leave(s)
        self._step += 1
        emitting = [c for c in draft.chunks if c.emit]
        return StepPlan(
            number=self._step,
            chunks=(*emitting, *(c for c in draft.chunks if not c.emit)),
            admissions=tuple(draft.admissions),
            pages=tuple(draft.entries),
            tokens=self.limits.tokens - draft.budget,
            emitting=len(emitting),
        )

    def commit(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Takes the step's tokens in, for the sequences that are still the ones that were planned."""
        events: list[Event] = []
        tokens: list[int] = result.tokens.tolist()
        for at, chunk in enumerate(plan.chunks):
            s = self._live[chunk.sequence]
            s.pending -= 1
            if s.finish_reason is not None:
                if s.pending == 0:
                    del self._live[s.number]
                continue
            if chunk.epoch != s.epoch or not chunk.emit:
                continue
            s.in_flight -= 1
            token = tokens[at]
            s.tokens.append(token)
            self.counts.generation_tokens += 1
            events.append(Event(s, token, at))
            if s.row is not None:
                self._publish(s)
            self._stop(s, token)
        return events

    def force(self, s: Sequence, token: int) -> None:
        """The next token is certain: it is taken in without being sampled, in place of the one in flight.

        All that is known of `s` has been launched, so that only forced tokens go down with the next chunk.
        """
        s.epoch += s.in_flight
        s.in_flight = 0
        s.tokens.append(token)
        s.given = len(s.tokens)
        self.counts.generation_tokens += 1
        self._stop(s, token)

    def unused_share(self) -> float:
        """Share of the KV slots in held pages that hold no token, over all groups."""
        held = sum(pool.total - pool.free for pool in self.pools)
        if not held:
            return 0.0
        unused = sum(len(pages) * self.limits.page - s.launched for s in self.running for pages in s.pages)
        return unused / (held * self.limits.page)

    # -- planning ---------------------------------------------------------------------------------------------

    def _continue_running(self, draft: _Draft) -> None:
        """Running sequences in order; a long prompt leaves one token of budget to each one that only decodes."""
        running = list(self.running)
        decoding: int | None = None
        """How many of those that follow only decode; counted once a long one asks."""
        for at, s in enumerate(running):
            count = s.wanted
            if s.row is None or count == 0:
                continue
            if count > 1:
                if decoding is None:
                    decoding = sum(other.wanted == 1 for other in running[at + 1 :])
                count = min(count, draft.budget - decoding)
            elif decoding is not None:
                decoding -= 1
            if count < 1 or draft.budget < 1:
                continue
            end = s.launched + count
            if end <= self._room(s) or self._make_room(s, end):
                self._add_chunk(draft, s, count)

    def _room(self, s: Sequence) -> int:
        """Tokens that its pages can hold; it has equally many in every group."""
        return len(s.pages[0]) * self.limits.page

    def _make_room(self, s: Sequence, tokens: int) -> bool:
        """Frees pages until `s` can hold `tokens`, by preempting whoever is served last; false if that is `s`."""
        while any(self._missing(s, g, tokens) > pool.free for g, pool in enumerate(self.pools)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is s:
                return False
        return True

    def _missing(self, s: Sequence, group: int, tokens: int) -> int:
        return self.pages_for(tokens) - len(s.pages[group])

    def _preempt(self, s: Sequence) -> None:
        """Back to the queue without row and pages. What is in flight for it is dropped when it comes in."""
        self._leave(s)
        s.epoch += 1
        s.in_flight = 0
        s.launched = 0
        self.counts.preemptions += 1
        self._enqueue(s)

    def _admit_waiting(self, draft: _Draft) -> None:
        """Waiting sequences in order, while rows, pages and budget last.

        One that would compute a page which a running sequence is computing right now steps aside for this step
        (bounded, so that a long queue costs nothing); one that does not fit holds back all behind it.
        """
        promised = {key for s in self.running if (key := self._promise(s))}
        owed = [sum(max(0, self._missing(s, g, s.known)) for s in self.running) for g in range(len(self.pools))]
        aside: list[tuple[tuple[int, int], Sequence]] = []
        nothing: list[list[int]] = [[] for _ in self.pools]
        for s in self._waiting_in_order():
            # Whatever is cached, everyone needs a row, a page and budget: asked first, because a hit costs its length.
            if not (draft.budget and self._rows and self._fits(1, nothing, owed)) or len(aside) >= 2 * self.limits.rows:
                break
            hit = nothing if s.pending else self._hit(s)
            if s.pending or self._awaits(s, hit, promised):
                aside.append(heapq.heappop(self._queue))
                continue
            cached = len(hit[0]) * self.limits.page
            count = min(s.wanted - cached, draft.budget)
            whole = self.limits.chunked or count == s.wanted - cached
            if not (whole and self._fits(self.pages_for(s.known), hit, owed)):
                break
            heapq.heappop(self._queue)
            self._admit(draft, s, hit, cached)
            self._add_chunk(draft, s, count)
            if key := self._promise(s):
                promised.add(key)
            for group in range(len(self.pools)):
                owed[group] += max(0, self._missing(s, group, s.known))
        for entry in aside:
            heapq.heappush(self._queue, entry)

    def _waiting_in_order(self) -> Iterator[Sequence]:
        while self._queue:
            _, s = self._queue[0]
            if s.queued:
                yield s
            else:
                heapq.heappop(self._queue)

    def _promise(self, s: Sequence) -> tuple[Parent, tuple[int, ...]] | None:
        """The page of known text that `s` will publish next, if the rest of its prompt holds a whole one."""
        end = (s.published + 1) * self.limits.page
        if not self.limits.caching or s.row is None or end > len(s.tokens):
            return None
        return (s.parents[0], tuple(s.tokens[end - self.limits.page : end]))

    def _awaits(self, s: Sequence, hit: list[list[int]], promised: set[tuple[Parent, tuple[int, ...]]]) -> bool:
        """Whether the first page that `s` would have to compute is one that a running sequence publishes soon."""
        at = len(hit[0]) * self.limits.page
        end = at + self.limits.page
        if not promised or end > self._reusable(s) or self._skips_cache(s):
            return False
        return (self.pools[0].parent(s.salt, hit[0]), tuple(s.tokens[at:end])) in promised

    def _reusable(self, s: Sequence) -> int:
        """The last known token is always computed: its hidden state is needed."""
        return len(s.tokens) - 1

    def _skips_cache(self, s: Sequence) -> bool:
        params = s.request.params
        return not self.limits.caching or params.prompt_logprobs is not None or bool(params.skip_reading_prefix_cache)

    def _hit(self, s: Sequence) -> list[list[int]]:
        """Per group the cached pages of the longest prefix that all groups still have."""
        if self._skips_cache(s):
            return [[] for _ in self.pools]
        found = [pool.match(s.salt, s.tokens, self._reusable(s)) for pool in self.pools]
        length = min(len(pages) for pages in found)
        return [pages[:length] for pages in found]

    def _fits(self, needed: int, hit: list[list[int]], owed: list[int]) -> bool:
        """Room for `needed` pages, beside what running sequences still need and a reserve against thrash."""
        reserve = self._watermark if self.running else 0
        return all(
            needed - len(pages) + owed[g] + reserve <= pool.free - pool.idle(pages)
            for g, (pool, pages) in enumerate(zip(self.pools, hit, strict=True))
        )

    def _admit(self, draft: _Draft, s: Sequence, hit: list[list[int]], cached: int) -> None:
        self._dequeue(s)
        s.row, s.given = self._rows.pop(), len(s.tokens)
        insort(self.running, s, key=lambda other: other.key)
        for pool, pages in zip(self.pools, hit, strict=True):
            for page in pages:
                pool.hold(page)
        s.pages = hit
        s.launched = cached
        s.published = len(hit[0])
        s.parents = [p.parent(s.salt, h) for p, h in zip(self.pools, hit, strict=True)]
        if not s.admitted:
            s.admitted, s.cached = True, cached
            self.counts.prefix_queries += s.prompt_len
            self.counts.prefix_hits += cached
        draft.admissions.append(
            Admission(
                sequence=s.number,
                row=s.row,
                prompt_len=s.prompt_len,
                cached=s.tokens[:cached],
                pages=tuple(tuple(pages) for pages in hit),
                params=s.request.params,
                stop_ids=tuple(sorted(s.stop_ids)),
                banned=s.banned,
                seed=s.seed,
            )
        )

    def _add_chunk(self, draft: _Draft, s: Sequence, count: int) -> None:
        assert s.row is not None
        start, end = s.launched, s.launched + count
        if end > self._room(s):
            self._take_pages(draft, s, end)
        emit = count == s.wanted
        ids: list[int] | tuple[()] = s.tokens[start:end] if start < s.given else ()
        targets: list[int] | tuple[()] = ()
        if start < s.prompt_len:
            self.counts.prompt_tokens += min(end, s.prompt_len) - start
            if s.request.params.prompt_logprobs is not None and s.index == 0:
                targets = s.tokens[start + 1 : min(end + 1, s.prompt_len)]
        draft.chunks.append(Chunk(s.number, s.epoch, s.row, start, count, emit, ids, targets))
        s.launched = end
        s.pending += 1
        s.in_flight += emit
        draft.budget -= count
        draft.planned.append(s)

    def _take_pages(self, draft: _Draft, s: Sequence, tokens: int) -> None:
        assert s.row is not None
        for group, pool in enumerate(self.pools):
            for _ in range(self._missing(s, group, tokens)):
                page = pool.take()
                draft.entries.append(PageEntry(group, s.row, len(s.pages[group]), page))
                s.pages[group].append(page)

    # -- after the launch, after the commit ---------------------------------------------------------------------

    def _publish(self, s: Sequence) -> None:
        """Offers the pages that are full of committed tokens to the prefix cache."""
        page = self.limits.page
        full = min(s.launched, len(s.tokens)) // page
        while s.published < full:
            at = s.published
            tokens = tuple(s.tokens[at * page : (at + 1) * page])
            for group, pool in enumerate(self.pools):
                s.parents[group] = pool.publish(s.pages[group][at], s.parents[group], tokens)
            s.published += 1

    def _drop_behind_window(self, s: Sequence) -> None:
        """Gives back pages that no later token of the sequence will look at."""
        for group, window in enumerate(self.limits.windows):
            if window is None:
                continue
            gone = min(max(0, s.launched - window + 1) // self.limits.page, s.published)
            for at in range(gone - 1, -1, -1):
                if not s.pages[group][at]:
                    break
                self.pools[group].release([s.pages[group][at]])
                s.pages[group][at] = 0

    def _stop(self, s: Sequence, token: int) -> None:
        if token in s.stop_ids and s.generated >= s.request.params.min_tokens:
            explicit = token in (s.request.params.stop_token_ids or ())
            self.finish(s, "stop", token if explicit else None)
        elif len(s.tokens) >= s.limit:
            self.finish(s, "length")

    def _sweep(self) -> None:
        """Ended sequences leave the queue once they are the most of it, whoever is ahead of them."""
        if len(self._queue) > 2 * self._waiting + 2 * self.limits.rows:
            self._queue = [entry for entry in self._queue if entry[1].queued]
            heapq.heapify(self._queue)

    def _enqueue(self, s: Sequence) -> None:
        s.queued = True
        self._waiting += 1
        self._waiting_tokens += s.prompt_len
        heapq.heappush(self._queue, (s.key, s))

    def _dequeue(self, s: Sequence) -> None:
        """Its entry in the heap is left behind, or taken by the caller."""
        s.queued = False
        self._waiting -= 1
        self._waiting_tokens -= s.prompt_len

    def _leave(self, s: Sequence) -> None:
        """Row and pages are free for the next plan: whatever uses them is launched after what `s` has in flight."""
        assert s.row is not None
        for pool, pages in zip(self.pools, s.pages, strict=True):
            pool.release([page for page in pages if page])
        self._rows.append(s.row)
        self.running.remove(s)
        s.row, s.pages, s.published = None, [], 0
