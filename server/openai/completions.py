"""POST /v1/completions: prompts in, texts out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import MAX_N, CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs
from server import body
from server.errors import bad_request
from server.ids import response_id
from server.openai.fields import IGNORED, INSTEAD, REFUSED_IN_COMPLETIONS
from server.openai.generating import Count, Names, collect, start, usage_chunks
from server.openai.logprobs import Lines, joined, prompt_logprobs, trimmed
from server.openai.params import sampling_params
from server.openai.prompts import Prompt, Wish, answer_room, completion_prompts, truncated
from server.openai.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest, Usage
from server.openai.sse import TEXT, EventStream, Template, event
from server.openai.structured import wanted
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
    asked = await body.read(
        request, service, CompletionRequest, refused=REFUSED_IN_COMPLETIONS, ignored=IGNORED, instead=INSTEAD
    )
    model = service.check_model(asked.model)
    names = Names(response_id("cmpl", request, asked.request_id), int(time.time()), model)
    if asked.stream:
        return EventStream(service, _events(asked, service, names))
    answer = await race(_whole(asked, service, names), request.receive, service.stopping)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _job(asked: CompletionRequest, service: Service, names: Names) -> Job:
    engine = service.ready()
    _check_best_of(asked)
    wish = Wish(asked.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens", "prompt")
    prompts = [truncated(p, asked, wish, engine.max_model_len) for p in await completion_prompts(asked, service)]
    if len(prompts) * (asked.best_of or asked.n or 1) > MAX_CHOICES:
        name = "n" if asked.best_of is None else "best_of"
        raise bad_request(f"{name} times the number of prompts must be at most {MAX_CHOICES}", name)
    rooms = [answer_room(p, wish, engine.max_model_len) for p in prompts]
    shape = wanted(asked)
    params = [
        sampling_params(
            asked,
            engine,
            max_tokens=max(room, 1),
            logprobs=0 if asked.logprobs is None and _chooses(asked) else asked.logprobs,
            prompt_logprobs=_scored(asked),
            logprobs_name="logprobs",
            structured=shape,
            candidates=asked.best_of,
        )
        for room in rooms
    ]
    texts = [_prompt_text(p, engine) if asked.echo else "" for p in prompts]
    service.admit(names.id, [prompt.ids for prompt in prompts], params)
    return Job(asked, engine, names, prompts, texts, params)


def _check_best_of(asked: CompletionRequest) -> None:
    if asked.best_of is None:
        return
    least = 1 if asked.n is None else asked.n
    if least < 1:
        raise bad_request(f"n must be in 1..{MAX_N}, got {asked.n}", "n")
    if not least <= asked.best_of <= MAX_N:
        raise bad_request(f"best_of must be in {least}..{MAX_N}, at least n, got {asked.best_of}", "best_of")
    if asked.stream and asked.best_of > least:
        raise bad_request("best_of cannot be streamed: the best are known at the end; leave out stream", "best_of")


def _chooses(asked: CompletionRequest) -> bool:
    """More answers are computed than told."""
    return asked.best_of is not None and asked.best_of > (asked.n or 1)


def _best(answers: Sequence[CompletionOutput], count: int) -> list[CompletionOutput]:
    """By mean log probability of their tokens, best first, numbered anew."""

    def mean(answer: CompletionOutput) -> float:
        return (answer.cumulative_logprob or 0.0) / max(len(answer.token_ids), 1)

    best = sorted(answers, key=mean, reverse=True)[:count]
    return [replace(answer, index=i) for i, answer in enumerate(best)]


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
        found = _best(output.outputs, asked.n or 1) if _chooses(asked) else output.outputs
        for choice in found:
            choices.append(Speaker(job, i, choice.index).choice(choice, output.prompt_logprobs))
    return Completion(
        id=names.id,
        created=names.created,
        model=names.model,
        choices=choices,
        usage=count.usage(),
        metrics=count.metrics() if service.server.enable_per_request_metrics else UNSET,
    )


async def _events(asked: CompletionRequest, service: Service, names: Names) -> AsyncGenerator[bytes]:
    job = await _job(asked, service, names)
    last, always = usage_chunks(asked.stream_options, service)
    timed = service.server.enable_per_request_metrics
    count = job.count()
    speakers: dict[tuple[int, int], Speaker] = {}
    scores: dict[int, Sequence[TokenLogprobs | None] | None] = {}
    plain = asked.logprobs is None and not asked.return_token_ids and not always
    """All that changes from chunk to chunk is the text."""
    templates: dict[tuple[int, int], Template] = {}
    """Of choices that have begun."""
    running = len(job.prompts)

    def chunk(choices: list[CompletionChoice], usage: Usage | UnsetType | None, ends: bool) -> bytes:
        return event(
            Completion(
                id=names.id,
                created=names.created,
                model=names.model,
                choices=choices,
                usage=usage,
                metrics=count.metrics() if ends and timed else UNSET,
            )
        )

    async with aclosing(job.outputs()) as outputs:
        async for i, output in outputs:
            count.add(i, output)
            running -= output.finished
            if output.prompt_logprobs is not None:
                scores[i] = output.prompt_logprobs
            for piece in output.outputs:
                at = i, piece.index
                template = templates.get(at)
                if template is not None and piece.text and piece.finish_reason is None:
                    yield template.event(piece.text)
                    continue
                speaker = speakers.get(at)
                if speaker is None:
                    speaker = speakers[at] = Speaker(job, i, piece.index)
                if speaker.has_news(piece):
                    usage = count.usage() if always else None if last else UNSET
                    ends = not running and not last and piece is output.outputs[-1]
                    yield chunk([speaker.choice(piece, scores.get(i))], usage, ends)
                    if plain and template is None:
                        example = CompletionChoice(index=speaker.index, text=TEXT)
                        templates[at] = Template(chunk([example], None if last else UNSET, False))
    if last:
        yield chunk([], count.usage(), True)


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
        self.index = prompt * (asked.n or 1) + index
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
            index=self.index,
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
