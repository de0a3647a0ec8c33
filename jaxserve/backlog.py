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
        self._forget_taken()
        self._posted.append(Waiting(sequences, tokens))

    def with_more(self, sequences: int, tokens: int) -> Waiting:
        """What would wait if a request of this size were posted now.

        Rows are given in order, so new requests get free ones only where nothing waits. Rows that the next step will
        free are not counted on.
        """
        self._forget_taken()
        seen = self.seen
        free = 0 if seen.waiting.sequences else seen.free_rows
        total, prompts = seen.waiting
        for new in (*self._posted, self._coming, Waiting(sequences, tokens)):
            left = max(0, new.sequences - free)
            free = max(0, free - new.sequences)
            total += left
            prompts += new.tokens * left // max(1, new.sequences)
        return Waiting(total, prompts)

    def _forget_taken(self) -> None:
        taken = self.seen.taken
        while self._before < taken:
            self._posted.popleft()
            self._before += 1
