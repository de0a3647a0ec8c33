"""POST /v1/chat/completions: messages in, the assistant's next one out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import CompletionOutput
from server import body
from server.ids import response_id
from server.openai.chat_job import Job, prepared
from server.openai.fields import IGNORED, INSTEAD, REFUSED_IN_CHAT
from server.openai.generating import Names, collect, usage_chunks
from server.openai.logprobs import prompt_logprobs
from server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatRequest,
    Usage,
)
from server.openai.speaking import Speaker
from server.openai.sse import TEXT, EventStream, Template, event
from server.parsers.events import Content, Event
from server.racing import race
from server.service import Service


async def chat_completions(request: Request) -> Response | EventStream:
    service: Service = request.app.state.service
    service.ready()
    asked = await body.read(request, service, ChatRequest, refused=REFUSED_IN_CHAT, ignored=IGNORED, instead=INSTEAD)
    model = service.check_model(asked.model)
    names = Names(response_id("chatcmpl", request, asked.request_id), int(time.time()), model)
    if asked.stream:
        return EventStream(service, _events(asked, service, names))
    answer = await race(_whole(asked, service, names), request.receive, service.stopping)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _whole(asked: ChatRequest, service: Service, names: Names) -> ChatCompletion:
    job = await prepared(asked, service, names)
    count = job.count()
    [output] = await collect(job.outputs(), 1)
    count.add(0, output)
    scores = output.prompt_logprobs
    speakers = [job.speaker() for _ in output.outputs]
    return ChatCompletion(
        id=names.id,
        created=names.created,
        model=names.model,
        choices=[_choice(job, *said) for said in zip(speakers, output.outputs, strict=True)],
        usage=job.usage(count, speakers),
        prompt_token_ids=tuple(job.prompt.ids) if asked.return_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(scores) if scores is not None else UNSET,
        metrics=count.metrics() if job.timed else UNSET,
    )


def _choice(job: Job, speaker: Speaker, choice: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=speaker.message(speaker.hear(choice)),
        logprobs=job.logprobs(choice),
        finish_reason=speaker.finish(choice.finish_reason),
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if job.request.return_token_ids else UNSET,
    )


async def _events(asked: ChatRequest, service: Service, names: Names) -> AsyncGenerator[bytes]:
    job = await prepared(asked, service, names)
    last, always = usage_chunks(asked.stream_options, service)
    count = job.count()
    speakers: dict[int, Speaker] = {}
    plain = not asked.logprobs and not asked.return_token_ids and not always
    """All that changes from chunk to chunk of content is its text."""
    templates: dict[int, Template] = {}

    def chunk(choices: list[ChatChunkChoice], *, first: bool = False, ends: bool = False) -> bytes:
        told = job.usage(count, list(speakers.values())) if always or (last and ends) else None
        usage: Usage | UnsetType | None = told if last else UNSET
        return event(
            ChatChunk(
                id=names.id,
                created=names.created,
                model=names.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=tuple(job.prompt.ids) if first and asked.return_token_ids else UNSET,
                metrics=count.metrics() if ends and job.timed else UNSET,
            )
        )

    async with aclosing(job.outputs()) as outputs:
        async for _, output in outputs:
            count.add(0, output)
            for piece in output.outputs:
                speaker = speakers.get(piece.index)
                if speaker is None:
                    speaker = speakers[piece.index] = job.speaker()
                    for i, hello in enumerate(_greeting(job, piece.index)):
                        yield chunk([hello], first=len(speakers) == 1 and i == 0)
                    if plain:
                        example = ChatChunkChoice(index=piece.index, delta=ChatDelta(content=TEXT))
                        templates[piece.index] = Template(chunk([example]))
                heard = speaker.hear(piece)
                if plain and piece.finish_reason is None and len(heard) == 1 and isinstance(heard[0], Content):
                    yield templates[piece.index].event(heard[0].text)
                    continue
                ends = output.finished and not last and piece is output.outputs[-1]
                news = _pieces(job, speaker, piece, heard)
                for said in news:
                    yield chunk([said], ends=ends and said is news[-1])
    if last:
        yield chunk([], ends=True)


def _greeting(job: Job, index: int) -> list[ChatChunkChoice]:
    """How a choice begins: its role, and then what it repeats."""
    deltas = [ChatDelta(role=job.manner.role, content="")]
    if job.manner.said:
        deltas.append(ChatDelta(content=job.manner.said))
    return [ChatChunkChoice(index=index, delta=delta) for delta in deltas]


def _pieces(job: Job, speaker: Speaker, piece: CompletionOutput, heard: list[Event]) -> list[ChatChunkChoice]:
    """What is new, then the end, if it has come. What is known of the tokens goes with the first of these."""
    with_ids = bool(job.request.return_token_ids)
    deltas = speaker.deltas(heard)
    if not deltas and piece.token_ids and (with_ids or piece.logprobs is not None):
        deltas = [ChatDelta()]
    found = [
        ChatChunkChoice(
            index=piece.index,
            delta=delta,
            logprobs=job.logprobs(piece) if i == 0 else None,
            token_ids=piece.token_ids if with_ids and i == 0 else UNSET,
        )
        for i, delta in enumerate(deltas)
    ]
    if piece.finish_reason is not None:
        found.append(
            ChatChunkChoice(
                index=piece.index,
                delta=ChatDelta(),
                finish_reason=speaker.finish(piece.finish_reason),
                stop_reason=piece.stop_reason,
            )
        )
    return found
