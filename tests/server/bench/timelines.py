"""Answers made by hand, whose numbers are plain to see."""

from __future__ import annotations

from server.bench.answers import Answer


def answer(
    start: float, *arrivals: float, prompt: int = 10, output: int | None = None, end: float | None = None
) -> Answer:
    return Answer(
        start=start,
        end=arrivals[-1] if end is None else end,
        arrivals=arrivals,
        prompt_tokens=prompt,
        output_tokens=len(arrivals) if output is None else output,
        text="x" * len(arrivals),
    )


def failure(start: float, error: str) -> Answer:
    return Answer(start=start, end=start + 9, error=error)
