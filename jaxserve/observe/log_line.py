"""The line of statistics in the log: what was done since the last one, and what is waiting."""

from __future__ import annotations

from jaxserve.types import RequestStats, StepStats


class LogLine:
    """An observer that sums up. The engine's thread adds; another one asks for the line."""

    def __init__(self) -> None:
        self._now: StepStats | None = None
        self._totals = (0, 0, 0, 0)
        self._told = (0, 0, 0, 0)
        self._was_busy = False

    def on_step(self, step: StepStats) -> None:
        prompt, generated, queries, hits = self._totals
        self._totals = (
            prompt + step.prompt_tokens + step.prefix_hits,
            generated + step.generation_tokens,
            queries + step.prefix_queries,
            hits + step.prefix_hits,
        )
        self._now = step

    def on_finish(self, request: RequestStats) -> None:
        pass

    def on_recompile(self, seconds: float) -> None:
        pass

    def take(self, seconds: float) -> str | None:
        """The line about the last `seconds`, or None when nothing went on in them or before them."""
        now, totals = self._now, self._totals
        prompt, generated, queries, hits = (new - old for new, old in zip(totals, self._told, strict=True))
        busy = bool(prompt or generated or (now and (now.running or now.waiting)))
        if now is None or not (busy or self._was_busy):
            return None
        self._told, self._was_busy = totals, busy
        usage = now.pages_used / now.pages_total if now.pages_total else 0.0
        rate = f"{hits / queries:.1%}" if queries else "none asked"
        return (
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generated / seconds:.1f} tokens/s, "
            f"running {now.running}, waiting {now.waiting}, KV use {usage:.1%}, prefix hits {rate}"
        )
