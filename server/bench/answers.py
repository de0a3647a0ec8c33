"""What is asked of a server and what became of it: the records that the rest of this room passes around.

Times are seconds of one clock, `time.perf_counter`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to make."""

    prompt: str
    prompt_tokens: int
    """By the tokenizer at hand; the server's own count beats it."""
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One request that was made. With an `error`, only `start` and `end` mean something."""

    start: float
    end: float
    """When the last event with a choice came."""
    arrivals: tuple[float, ...] = ()
    """When events with new text came."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them: an event may bring several tokens."""
    text: str = ""
    error: str = ""
    status: int = 200
    """Of HTTP; 0 where no answer came."""

    @property
    def ttft(self) -> float:
        """To the first token."""
        return self.arrivals[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Between one event with text and the next."""
        return [new - old for old, new in itertools.pairwise(self.arrivals)]

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def tpot(self) -> float | None:
        """Time of a token after the first one; there is none in an answer of one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Load:
    """All answers of one run, in the order of their samples."""

    answers: tuple[Answer, ...]
    seconds: float
    """From the beginning of the run until the last answer had ended."""
