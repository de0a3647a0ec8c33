"""POST /v1/chat/completions: messages in, the assistant's next one out, whole or streamed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import CompletionOutput, RequestOutput, SamplingParams
from server import body
from server.errors import bad_request
from server.ids import response_id
from server.openai.fields import IGNORED, REFUSED_IN_CHAT
from server.openai.generating import Count, Names, collect, start
from server.openai.logprobs import chat_logprobs, prompt_logprobs
from server.openai.params import sampling_params
from server.openai.prompts import Prompt, Wish, answer_room, chat_prompt
from server.openai.protocol import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    Usage,
)
from server.openai.sse import EventStream, event
from server.racing import race
from server.service import Engine, Service


@dataclass(frozen=True, slots=True)
class Job:
    """A checked request."""

    request: ChatRequest
    engine: Engine
    names: Names
    prompt: Prompt
    params: SamplingParams

    def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        return start(self.engine, self.names, self.request, [self.prompt], [self.params])

    def count(self) -> Count:
        return Count(len(self.prompt.ids))

    def logprobs(self, piece: CompletionOutput) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        as_ids = bool(self.request.return_tokens_as_token_ids)
        top = self.request.top_logprobs or 0
        return chat_logprobs(piece.token_ids, piece.logprobs, top, self.engine.tokenizer, as_ids)


async def chat_completions(request: Request) -> Response | EventStream:
    service: Service = request.app.state.service
    service.ready()
    asked = await body.read(request, service, ChatRequest, refused=REFUSED_IN_CHAT, ignored=IGNORED)
    model = service.check_model(asked.model)
    names = Names(response_id("chatcmpl", request, asked.request_id), int(time.time()), model)
    if asked.stream:
        return EventStream(service, _events(asked, service, names))
    answer = await race(_whole(asked, service, names), request.receive, service.stopping)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _job(asked: ChatRequest, service: Service, names: Names) -> Job:
    engine = service.ready()
    if asked.top_logprobs and not asked.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    prompt = await chat_prompt(asked.chat(), service)
    wish = _wish(asked, engine)
    if wish.tokens == 0:
        raise bad_request(f"{wish.tokens_name} must be at least 1", wish.tokens_name)
    params = sampling_params(
        asked,
        engine,
        max_tokens=answer_room(prompt, wish, engine.max_model_len),
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_logprobs=asked.prompt_logprobs,
        logprobs_name="top_logprobs",
    )
    return Job(asked, engine, names, prompt, params)


def _wish(asked: ChatRequest, engine: Engine) -> Wish:
    """The newer of OpenAI's two names wins."""
    usual = engine.default_params.get("max_tokens")
    default = usual if isinstance(usual, int) else None
    if asked.max_completion_tokens is not None:
        return Wish(asked.max_completion_tokens, default, "max_completion_tokens", "messages")
    return Wish(asked.max_tokens, default, "max_tokens", "messages")


async def _whole(asked: ChatRequest, service: Service, names: Names) -> ChatCompletion:
    job = await _job(asked, service, names)
    count = job.count()
    [output] = await collect(job.outputs(), 1)
    count.add(0, output)
    scores = output.prompt_logprobs
    return ChatCompletion(
        id=names.id,
        created=names.created,
        model=names.model,
        choices=[_choice(job, choice) for choice in output.outputs],
        usage=count.usage(),
        prompt_token_ids=tuple(job.prompt.ids) if asked.return_token_ids else UNSET,
        prompt_logprobs=prompt_logprobs(scores) if scores is not None else UNSET,
    )


def _choice(job: Job, choice: CompletionOutput) -> ChatChoice:
    return ChatChoice(
        index=choice.index,
        message=ChatMessage(content=choice.text),
        logprobs=job.logprobs(choice),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if job.request.return_token_ids else UNSET,
    )


async def _events(asked: ChatRequest, service: Service, names: Names) -> AsyncGenerator[bytes]:
    job = await _job(asked, service, names)
    options = asked.stream_options
    last = bool(options and options.include_usage)
    always = last and bool(options and options.continuous_usage_stats)
    count = job.count()
    greeted: set[int] = set()

    def chunk(choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, first: bool = False) -> bytes:
        return event(
            ChatChunk(
                id=names.id,
                created=names.created,
                model=names.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=tuple(job.prompt.ids) if first and asked.return_token_ids else UNSET,
            )
        )

    async with aclosing(job.outputs()) as outputs:
        async for _, output in outputs:
            count.add(0, output)
            usage = count.usage() if always else None if last else UNSET
            for piece in output.outputs:
                if piece.index not in greeted:
                    hello = ChatChunkChoice(index=piece.index, delta=ChatDelta(role="assistant", content=""))
                    yield chunk([hello], usage, first=not greeted)
                    greeted.add(piece.index)
                for said in _pieces(job, piece):
                    yield chunk([said], usage)
    if last:
        yield chunk([], count.usage())


def _pieces(job: Job, piece: CompletionOutput) -> list[ChatChunkChoice]:
    """The new text, if there is any to tell of, and then the end, if it has come."""
    with_ids = bool(job.request.return_token_ids)
    found: list[ChatChunkChoice] = []
    if piece.text or (piece.token_ids and (with_ids or piece.logprobs is not None)):
        found.append(
            ChatChunkChoice(
                index=piece.index,
                delta=ChatDelta(content=piece.text),
                logprobs=job.logprobs(piece),
                token_ids=piece.token_ids if with_ids else UNSET,
            )
        )
    if piece.finish_reason is not None:
        found.append(
            ChatChunkChoice(
                index=piece.index,
                delta=ChatDelta(),
                finish_reason=piece.finish_reason,
                stop_reason=piece.stop_reason,
            )
        )
    return found
