"""One sequence on its way: what is committed, what is in flight, which pages and row it holds.

A record that only the scheduler changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.host.pages import Parent
from jaxserve.types import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request: its prompt and what was generated.

    known = committed tokens + tokens in flight. A step computes tokens from `launched` on; when it reaches `known`
    it samples the next one:

        0        cached      launched      len(tokens)      known
        |--hit---|--computed-|--wanted-----|--in flight-----|
    """

    number: int
    request: Request
    index: int
    """Which of the request's n choices."""
    seed: int
    limit: int
    """Length at which the sequence ends: prompt + max_tokens, or the model's."""
    stop_ids: frozenset[int]
    banned: tuple[tuple[int, ...], ...] = ()
    salt: str = ""
    """Keeps its prefix pages apart from those of other salts."""
    tokens: list[int] = field(default_factory=list[int])
    launched: int = 0
    in_flight: int = 0
    pending: int = 0
    """Chunks launched and not committed, of any epoch."""
    epoch: int = 0
    """Rises whenever what is in flight becomes void; results of an earlier epoch are dropped."""
    queued: bool = False
    """Waits for a row."""
    row: int | None = None
    given: int = 0
    """Tokens up to here come from the host; what was sampled later, the device wrote into its table itself."""
    pages: list[list[int]] = field(default_factory=list[list[int]])
    """Per cache group; 0 where a page has left the window."""
    published: int = 0
    """Pages offered to the prefix cache."""
    parents: list[Parent] = field(default_factory=list[Parent])
    """Per cache group: what the next page to publish follows."""
    cached: int = 0
    """Prompt tokens found in the prefix cache at the first admission."""
    admitted: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def known(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def wanted(self) -> int:
        return len(self.tokens) + self.in_flight - self.launched

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return (self.request.priority, self.number)
