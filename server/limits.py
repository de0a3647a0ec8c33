"""How much may wait for a row: a request that would make it more is refused before any of it is begun."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from jaxserve.config import ServerConfig
from server.errors import ApiError

RETRY_SECONDS = 1


class QueueLimits:
    """`--max-num-queued-reqs` and `--max-num-queued-tokens`. Used in one event loop, so that checks never overlap."""

    def __init__(self, server: ServerConfig) -> None:
        self._most = {
            "max_num_queued_reqs": server.max_num_queued_reqs,
            "max_num_queued_tokens": server.max_num_queued_tokens,
        }
        self._limited = any(most is not None for most in self._most.values())
        self._promised = (0, 0)
        """Sequences and prompt tokens that were admitted but are not with the engine yet."""
        self.on_refusal: Callable[[str], object] = lambda reason: None
        """Hears of each refused request, by the name of the limit."""

    def admit(self, waiting_with: Callable[[int, int], tuple[int, int]], sizes: Sequence[tuple[int, int]]) -> None:
        """Lets all prompts of a request in, or none. They must go to the engine at once.

        `waiting_with` is the engine's: sequences and tokens that would wait if so many came. `sizes`: the same two of
        each prompt.

        Raises:
            ApiError: 503, the queue is full.
        """
        if not self._limited:
            return
        sequences, tokens = sum(count for count, _ in sizes), sum(length for _, length in sizes)
        before = self._promised
        waiting = waiting_with(before[0] + sequences, before[1] + tokens)
        for count, (name, most) in zip(waiting, self._most.items(), strict=True):
            if most is not None and count > most:
                self.on_refusal(name)
                raise _queue_full(name, most)
        if len(sizes) > 1:
            self._promised = (before[0] + sequences, before[1] + tokens)
            asyncio.get_running_loop().call_soon(self._hand_over, sequences, tokens)

    def _hand_over(self, sequences: int, tokens: int) -> None:
        """A single prompt goes to the engine before anybody else runs; the tasks of several stand behind this call."""
        self._promised = (self._promised[0] - sequences, self._promised[1] - tokens)


def _queue_full(name: str, most: int) -> ApiError:
    what = "requests" if name == "max_num_queued_reqs" else "prompt tokens"
    return ApiError(
        503,
        f"too much waits already: at most {most} {what} may (--{name.replace('_', '-')}); try again later",
        code="queue_full",
        headers={"Retry-After": str(RETRY_SECONDS)},
    )
