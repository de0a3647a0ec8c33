"""POST /v1/completions: prompts in, texts out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs
from server import body
from server.errors import bad_request
from server.ids import response_id
from server.openai.fields import IGNORED, REFUSED_IN_COMPLETIONS
from server.openai.generating import Count, Names, collect, start
from server.openai.logprobs import Lines, joined, prompt_logprobs, trimmed
from server.openai.params import sampling_params
from server.openai.prompts import Prompt, Wish, answer_room, completion_prompts
from server.openai.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from server.openai.sse import EventStream, event
from server.racing import race
from server.service import Engine, Service

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 16384
"""Of all prompts of a request together."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request."""

    request: CompletionRequest
    engine: Engine
    names: Names
    prompts: Sequence[Prompt]
    texts: Sequence[str]
    """The prompts as text where `echo` asks for it, else empty strings."""
    params: Sequence[SamplingParams]

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        outputs = start(self.engine, self.names, self.request, self.prompts, self.params)
        return _silenced(outputs) if self.request.max_tokens == 0 else outputs

    def count(self) -> Count:
        return Count(sum(len(prompt.ids) for prompt in self.prompts))


async def completions(request: Request) -> Response | EventStream:
    service: Service = request.app.state.service
    service.ready()
    asked = await body.read(request, service, CompletionRequest, refused=REFUSED_IN_COMPLETIONS, ignored=IGNORED)
    model = service.check_model(asked.model)
    names = Names(response_id("cmpl", request, asked.request_id), int(time.time()), model)
    if asked.stream:
        return EventStream(service, _events(asked, service, names))
    answer = await race(_whole(asked, service, names), request.receive, service.stopping)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _job(asked: CompletionRequest, service: Service, names: Names) -> Job:
    engine = service.ready()
    prompts = await completion_prompts(asked, service)
    if len(prompts) * (asked.n or 1) > MAX_CHOICES:
        raise bad_request(f"n times the number of prompts must be at most {MAX_CHOICES}", "n")
    wish = Wish(asked.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens", "prompt")
    rooms = [answer_room(p, wish, engine.max_model_len) for p in prompts]
    params = [
        sampling_params(
            asked,
            engine,
            max_tokens=max(room, 1),
            logprobs=asked.logprobs,
            prompt_logprobs=_scored(asked),
            logprobs_name="logprobs",
        )
        for room in rooms
    ]
    texts = [_prompt_text(p, engine) if asked.echo else "" for p in prompts]
    return Job(asked, engine, names, prompts, texts, params)


def _scored(asked: CompletionRequest) -> int | None:
    """How many alternatives of prompt tokens are needed: for `prompt_logprobs`, and for `logprobs` of an echo."""
    wanted = [n for n in (asked.prompt_logprobs, asked.logprobs if asked.echo else None) if n is not None]
    return None if not wanted else -1 if -1 in wanted else max(wanted)


def _prompt_text(prompt: Prompt, engine: Engine) -> str:
    if prompt.text is not None:
        return prompt.text
    return engine.tokenizer.decode(prompt.ids, skip_special_tokens=True)


async def _whole(asked: CompletionRequest, service: Service, names: Names) -> Completion:
    job = await _job(asked, service, names)
    count = job.count()
    choices: list[CompletionChoice] = []
    for i, output in enumerate(await collect(job.outputs(), len(job.prompts))):
        count.add(i, output)
        for choice in output.outputs:
            choices.append(Speaker(job, i, choice.index).choice(choice, output.prompt_logprobs))
    return Completion(id=names.id, created=names.created, model=names.model, choices=choices, usage=count.usage())


async def _events(asked: CompletionRequest, service: Service, names: Names) -> AsyncGenerator[bytes]:
    job = await _job(asked, service, names)
    options = asked.stream_options
    last = bool(options and options.include_usage)
    always = last and bool(options and options.continuous_usage_stats)
    count = job.count()
    speakers: dict[tuple[int, int], Speaker] = {}
    scores: dict[int, Sequence[TokenLogprobs | None] | None] = {}

    def chunk(choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return event(Completion(id=names.id, created=names.created, model=names.model, choices=choices, usage=usage))

    async with aclosing(job.outputs()) as outputs:
        async for i, output in outputs:
            count.add(i, output)
            if output.prompt_logprobs is not None:
                scores[i] = output.prompt_logprobs
            for piece in output.outputs:
                speaker = speakers.get((i, piece.index))
                if speaker is None:
                    speaker = speakers[i, piece.index] = Speaker(job, i, piece.index)
                if speaker.has_news(piece):
                    usage = count.usage() if always else None if last else UNSET
                    yield chunk([speaker.choice(piece, scores.get(i))], usage)
    if last:
        yield chunk([], count.usage())


async def _silenced(
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput]]:
    """For max_tokens 0: the one token that the engine had to generate is taken away."""
    async with aclosing(outputs) as stream:
        async for i, output in stream:
            yield i, replace(output, outputs=tuple(_silent(choice) for choice in output.outputs))


def _silent(choice: CompletionOutput) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else ()
    reason = None if choice.finish_reason is None else "length"
    return replace(choice, text="", token_ids=(), logprobs=logprobs, finish_reason=reason, stop_reason=None)


class Speaker:
    """One choice: what was said of it so far decides what the next piece must hold."""

    def __init__(self, job: Job, prompt: int, index: int) -> None:
        asked = job.request
        self._job = job
        self._prompt = prompt
        self._index = prompt * (asked.n or 1) + index
        self._first = True
        self._lines = Lines(
            job.engine.tokenizer,
            as_ids=bool(asked.return_tokens_as_token_ids),
            skip_special=asked.skip_special_tokens is not False,
        )

    def has_news(self, piece: CompletionOutput) -> bool:
        return bool(
            piece.text
            or piece.finish_reason
            or (self._first and self._job.request.echo)
            or (piece.token_ids and (piece.logprobs is not None or self._job.request.return_token_ids))
        )

    def choice(self, piece: CompletionOutput, scores: Sequence[TokenLogprobs | None] | None) -> CompletionChoice:
        """`piece` as a choice; the first one carries what concerns the prompt."""
        asked, first = self._job.request, self._first
        self._first = False
        prompt = self._job.prompts[self._prompt]
        wanted = None if scores is None or asked.prompt_logprobs is None else trimmed(scores, asked.prompt_logprobs)
        return CompletionChoice(
            index=self._index,
            text=self._job.texts[self._prompt] + piece.text if first else piece.text,
            logprobs=self._logprobs(piece, scores, first),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if asked.return_token_ids else UNSET,
            prompt_token_ids=tuple(prompt.ids) if asked.return_token_ids and first else UNSET,
            prompt_logprobs=prompt_logprobs(wanted) if wanted else UNSET,
        )

    def _logprobs(
        self, piece: CompletionOutput, scores: Sequence[TokenLogprobs | None] | None, first: bool
    ) -> CompletionLogprobs | None:
        most = self._job.request.logprobs
        if most is None:
            return None
        if not (first and self._job.request.echo and scores is not None):
            return self._lines.add(piece.token_ids, piece.logprobs or ())
        before = self._lines.add(self._job.prompts[self._prompt].ids, trimmed(scores, most))
        return joined(before, self._lines.add(piece.token_ids, piece.logprobs or ()))
