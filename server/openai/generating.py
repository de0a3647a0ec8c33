"""The prompts of one HTTP request at work together: their outputs in one stream, their tokens in one count."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from jaxserve.types import CompletionOutput, RequestOutput, SamplingParams
from server.openai.prompts import Prompt
from server.openai.protocol import PromptTokensDetails, SamplingFields, Usage
from server.service import Engine


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
    engine: Engine, names: Names, fields: SamplingFields, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """The outputs of every prompt as they come, each with its prompt's index. Close it to abort them all."""
    return _merged(
        [
            engine.generate(
                prompt.ids, own, engine_id(names.id, i), priority=fields.priority or 0, cache_salt=fields.cache_salt
            )
            for i, (prompt, own) in enumerate(zip(prompts, params, strict=True))
        ]
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


@dataclass(slots=True)
class Count:
    """Tokens so far. A prompt counts once, however many choices it has."""

    prompt: int
    cached: dict[int, int] = field(default_factory=dict[int, int])
    completion: int = 0

    def add(self, index: int, output: RequestOutput) -> None:
        self.cached[index] = output.num_cached_tokens
        self.completion += sum(len(choice.token_ids) for choice in output.outputs)

    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=self.completion,
            total_tokens=self.prompt + self.completion,
            prompt_tokens_details=PromptTokensDetails(sum(self.cached.values())),
        )


type _Item = tuple[int, RequestOutput] | BaseException | None


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput]]) -> AsyncGenerator[tuple[int, RequestOutput]]:
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for output in only:
                yield 0, output
        return
    queue: asyncio.Queue[_Item] = asyncio.Queue(maxsize=2 * len(streams))
    tasks = [asyncio.create_task(_pump(i, stream, queue)) for i, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            item = await queue.get()
            if item is None:
                open_streams -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(index: int, stream: AsyncGenerator[RequestOutput], queue: asyncio.Queue[_Item]) -> None:
    """A full queue holds the stream back."""
    end: BaseException | None = None
    try:
        async with aclosing(stream) as outputs:
            async for output in outputs:
                await queue.put((index, output))
    except Exception as error:
        end = error
    await queue.put(end)
