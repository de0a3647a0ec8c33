"""Uneven answers on four rows, through the real scheduler: steps and KV slots, beside older ways to batch.

    python benchmarks/scheduling.py

The device is a stand-in that computes nothing: it keeps each row's page table as the plans say. A static batch is one
that nobody may join; a naive server is one whose page is a whole context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine import Bounds, Engine
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.host.text import TokenStream
from jaxserve.plan import Choice, StepPlan, StepResult
from jaxserve.types import Request, SamplingParams

ANSWERS = (5, 40, 8, 6, 35, 7, 9, 4)
PROMPT, ROWS, PAGE, CONTEXT, BUDGET = 100, 4, 16, 2048, 2048


@dataclass(frozen=True)
class Outcome:
    """What a way of batching took."""

    steps: int
    """Steps that gave tokens."""
    slots: int
    """KV slots that the sequences held at their ends, all together."""
    tokens: int

    @property
    def rows_busy(self) -> float:
        """Share of the rows that gave a token, over the steps."""
        return self.tokens / (self.steps * ROWS)


class StandIn:
    """An `Executor` and its `Flight`s: every token is 0. Sees what a device would see, the plans, and nothing else."""

    def __init__(self) -> None:
        self.steps = 0
        self.held: dict[int, int] = {}
        """Pages in the row's table at the latest chunk of each sequence: in the end, at its last."""
        self._tables: dict[int, set[int]] = {}

    def launch(self, plan: StepPlan) -> Done:
        for admission in plan.admissions:
            self._tables[admission.row] = set(admission.pages[0])
        for entry in plan.pages:
            self._tables[entry.row].add(entry.page)
        for chunk in plan.chunks:
            self.held[chunk.sequence] = len(self._tables[chunk.row])
        self.steps += plan.emitting > 0
        return Done(plan.emitting)

    def close(self) -> None:
        self._tables.clear()


@dataclass(frozen=True)
class Done:
    emitting: int

    def sample(self, choice: Choice | None = None) -> None:
        pass

    def read(self) -> StepResult:
        return StepResult(np.zeros(self.emitting, np.int32), None, {})


class NoText:
    """A `Vocabulary` for requests that want token ids only."""

    def stream(self, *, skip_special_tokens: bool, prompt: Sequence[int]) -> TokenStream:
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        raise NotImplementedError

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError


def serve(*, depth: int = 1, page: int = PAGE, static: bool = False) -> Outcome:
    """Serves all requests, `depth` steps in flight. `static`: a batch ends before the next begins."""
    device = StandIn()
    pages = len(ANSWERS) * -(-CONTEXT // page) + 1
    scheduler = Scheduler(Limits(ROWS, BUDGET, page, (pages,), (None,), caching=False))
    bounds = Bounds(CONTEXT, 1, 0, (), priorities=False, seed=0, max_bad_tokens=0, max_banned=0)
    engine = Engine(scheduler, device, NoText(), bounds, depth=depth)
    coming = deque(_requests())
    tokens = 0
    while coming or engine.busy:
        if not static or not engine.busy:
            for _ in range(min(ROWS if static else len(coming), len(coming))):
                engine.add(coming.popleft())
        tokens += sum(len(choice.token_ids) for output in engine.step() for choice in output.outputs)
    return Outcome(device.steps, sum(device.held.values()) * page, tokens)


def _requests() -> list[Request]:
    return [
        Request(str(i), (0,) * PROMPT, SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False))
        for i, n in enumerate(ANSWERS)
    ]


def main() -> None:
    print(f"answers of {', '.join(map(str, ANSWERS))} tokens to prompts of {PROMPT}, on {ROWS} rows\n")
    print(f"{'':37s}  steps  rows busy  KV slots held at the ends")
    for name, outcome in (
        (f"static batches, {CONTEXT} slots a sequence", serve(page=CONTEXT, static=True)),
        (f"continuous, pages of {PAGE}", serve()),
        (f"continuous, pages of {PAGE}, overlap 2", serve(depth=2)),
    ):
        print(f"{name:37s} {outcome.steps:6d} {outcome.rows_busy:10.0%} {outcome.slots:26,d}")


if __name__ == "__main__":
    main()
