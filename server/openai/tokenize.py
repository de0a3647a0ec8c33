"""POST /tokenize and /detokenize: what the engine would see of a text, and back."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server import body
from server.errors import bad_request
from server.openai.conversation import conversation
from server.openai.fields import IGNORED, REFUSED_IN_TOKENIZE
from server.openai.logprobs import token_name
from server.openai.prompts import decode, encode, maybe_in_thread
from server.openai.protocol import ChatFields, DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from server.openai.tools import tool_use
from server.service import Service


async def tokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    engine = service.ready()
    asked = await body.read(request, service, TokenizeRequest, refused=REFUSED_IN_TOKENIZE, ignored=IGNORED)
    service.check_model(asked.model)
    ids = await _ids(asked, service)
    names = await _names(ids, service) if asked.return_token_strs else None
    reply = TokenizeReply(len(ids), engine.max_model_len, ids, names)
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def detokenize(request: Request) -> Response:
    service: Service = request.app.state.service
    service.ready()
    asked = await body.read(request, service, DetokenizeRequest, refused={}, ignored=IGNORED)
    service.check_model(asked.model)
    reply = DetokenizeReply(await decode(asked.tokens, service))
    return Response(msgspec.json.encode(reply), media_type="application/json")


async def _names(ids: list[int], service: Service) -> list[str]:
    tokenizer = service.ready().tokenizer
    return await maybe_in_thread(service, len(ids), lambda: [token_name(i, tokenizer, as_id=False) for i in ids])


async def _ids(asked: TokenizeRequest, service: Service) -> list[int]:
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("give prompt or messages, one of them", "prompt")
    if asked.prompt is not None:
        return await encode(asked.prompt, service, special=asked.add_special_tokens is not False)
    chat = ChatFields(
        messages=asked.messages or [],
        tools=asked.tools,
        documents=asked.documents,
        chat_template=asked.chat_template,
        add_generation_prompt=asked.add_generation_prompt,
        continue_final_message=asked.continue_final_message,
        add_special_tokens=asked.add_special_tokens,
        chat_template_kwargs=asked.chat_template_kwargs,
        reasoning_effort=asked.reasoning_effort,
    )
    return (await conversation(chat, tool_use(asked.tools, None, None), service)).prompt.ids
