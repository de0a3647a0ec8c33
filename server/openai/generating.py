"""The prompts of one HTTP request at work together: their outputs in one stream, their tokens in one count."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from jaxserve.types import CompletionOutput, InvalidRequest, RequestOutput, SamplingParams
from server.errors import bad_request
from server.openai import beams
from server.openai.merging import merged
from server.openai.prompts import Prompt
from server.openai.protocol import PromptTokensDetails, RequestMetrics, SamplingFields, StreamOptions, Usage
from server.service import Engine, Service


@dataclass(frozen=True, slots=True)
class Names:
    """What every chunk of an answer repeats."""

    id: str
    created: int
    model: str


def engine_id(shown: str, index: int) -> str:
    """The engine's own name for prompt `index`: callers may repeat theirs, ours never repeats."""
    return f"{shown}-{index}-{uuid.uuid4().hex[:12]}"


def start(
    engine: Engine,
    names: Names,
    fields: SamplingFields,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    thinking_end: str | None = None,
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of every prompt as they come, each with its prompt's index. Close it to abort them all.

    With `use_beam_search` there is one for each prompt, at the end of its search, which is `n` of its params wide.
    """
    generate = beams.search if fields.use_beam_search else partial(_sample, thinking_end)
    outputs = merged(
        [
            generate(engine, engine_id(names.id, i), prompt.ids, own, fields)
            for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
    )
    shaped = fields.response_format is not None and fields.response_format.type != "text"
    return _blaming_format(outputs) if shaped else outputs


async def _blaming_format(
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """What is wrong with a shape is told of the field that asked for it."""
    async with aclosing(outputs) as stream:
        try:
            async for found in stream:
                yield found
        except InvalidRequest as error:
            if error.param == "structured_outputs":
                raise bad_request(f"response_format: {error}", "response_format") from None
            raise


def _sample(
    thinking_end: str | None,
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    fields: SamplingFields,
) -> AsyncGenerator[RequestOutput]:
    return engine.generate(
        prompt,
        params,
        name,
        priority=fields.priority or 0,
        cache_salt=fields.cache_salt,
        thinking_end=thinking_end,
    )


async def collect(outputs: AsyncGenerator[tuple[int, RequestOutput]], prompts: int) -> list[RequestOutput]:
    """The whole answer to each prompt, choices in order."""
    found: list[RequestOutput | None] = [None] * prompts
    async with aclosing(outputs) as stream:
        async for i, output in stream:
            found[i] = _with_choices(found[i], output)
    return [output for output in found if output is not None]


def _with_choices(before: RequestOutput | None, output: RequestOutput) -> RequestOutput:
    """Final outputs of some choices after those of others."""
    if before is None:
        return output
    choices: dict[int, CompletionOutput] = {c.index: c for c in (*before.outputs, *output.outputs)}
    logprobs = before.prompt_logprobs if output.prompt_logprobs is None else output.prompt_logprobs
    return replace(output, outputs=tuple(choices[i] for i in sorted(choices)), prompt_logprobs=logprobs)


def usage_chunks(options: StreamOptions | None, service: Service) -> tuple[bool, bool]:
    """Whether a stream ends with a chunk of usage, and whether every chunk tells of it."""
    last = bool(options and options.include_usage) or service.server.enable_force_include_usage
    return last, last and bool(options and options.continuous_usage_stats)


@dataclass(slots=True)
class Count:
    """Tokens and times so far. A prompt counts once, however many choices it has."""

    prompt: int
    latest: dict[int, RequestOutput] = field(default_factory=dict[int, RequestOutput])
    """Output of each prompt."""
    lengths: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Of each choice of each prompt."""

    def add(self, index: int, output: RequestOutput) -> None:
        self.latest[index] = output
        for choice in output.outputs:
            at = index, choice.index
            self.lengths[at] = self.lengths.get(at, 0) + len(choice.token_ids)

    @property
    def completion(self) -> int:
        return sum(self.lengths.values())

    def metrics(self) -> RequestMetrics:
        """Of all prompts together, which were all answered."""
        times = [output.metrics for output in self.latest.values()]
        arrival, last = min(t.arrival for t in times), max(t.last_token for t in times)
        begin, first = min(t.first_scheduled for t in times), min(t.first_token for t in times)
        gaps = max(self.lengths.values()) - 1
        return RequestMetrics(
            time_to_first_token_ms=_milliseconds(first - arrival),
            queue_time_ms=_milliseconds(begin - arrival),
            generation_time_ms=_milliseconds(last - begin),
            mean_itl_ms=_milliseconds((last - first) / gaps) if gaps > 0 else None,
            tokens_per_second=round(self.completion / (last - begin), 3) if last > begin else 0.0,
        )

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            total_tokens=self.prompt + self.completion,
            prompt_tokens_details=PromptTokensDetails(sum(output.num_cached_tokens for output in self.latest.values())),
        )


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
