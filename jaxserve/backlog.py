"""How much of what was handed to the engine waits for a row, as whoever hands it over can know.

The engine's thread leaves what it saw after each step, in one frozen record; the event loop's thread adds what it has
posted since. Knows sizes only: no request and no scheduler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple


class Waiting(NamedTuple):
    """Sequences without a row, and the tokens of their prompts, one prompt a sequence."""

    sequences: int
    tokens: int


class Seen(NamedTuple):
    """The engine after a step."""

    taken: int
    """Requests that it was handed since the start."""
    waiting: Waiting
    free_rows: int


class _After(NamedTuple):
    """Where some requests would leave the engine that was seen."""

    free: int
    """Rows."""
    waiting: Waiting

    def post(self, new: Waiting) -> _After:
        left = max(0, new.sequences - self.free)
        sequences, tokens = self.waiting
        prompts = new.tokens * left // max(1, new.sequences)
        return _After(max(0, self.free - new.sequences), Waiting(sequences + left, tokens + prompts))


class Backlog:
    """Counts for the thread that posts; `seen` is replaced, never changed, by the engine's."""

    def __init__(self, rows: int) -> None:
        self.seen = Seen(0, Waiting(0, 0), rows)
        self._posted: deque[Waiting] = deque()
        """Sizes of the requests that `seen` does not know of, in order."""
        self._before = 0
        """Requests posted before those."""
        self._coming = Waiting(0, 0)
        """Sums over the requests that will be posted soon."""
        self._known: Seen | None = None
        self._after = _After(rows, Waiting(0, 0))
        """Where those posted would leave `_known`; counted on with each, so that a crowd costs what it is."""

    @contextmanager
    def coming(self, sequences: int, tokens: int) -> Generator[None]:
        """A request that cannot be posted yet counts all the same."""
        self._coming = Waiting(self._coming.sequences + sequences, self._coming.tokens + tokens)
        try:
            yield
        finally:
            self._coming = Waiting(self._coming.sequences - sequences, self._coming.tokens - tokens)

    def post(self, sequences: int, tokens: int) -> None:
        """A request goes to the engine."""
        new = Waiting(sequences, tokens)
        self._after = self._now().post(new)
        self._posted.append(new)

    def with_more(self, sequences: int, tokens: int) -> Waiting:
        """What would wait if a request of this size were posted now.

        Rows are given in order, so new requests get free ones only where nothing waits. Rows that the next step will
        free are not counted on.
        """
        return self._now().post(self._coming).post(Waiting(sequences, tokens)).waiting

    def _now(self) -> _After:
        seen = self.seen
        if seen is not self._known:
            self._known = seen
            while self._before < seen.taken:
                self._posted.popleft()
                self._before += 1
            self._after = _After(0 if seen.waiting.sequences else seen.free_rows, seen.waiting)
            for new in self._posted:
                self._after = self._after.post(new)
        return self._after
