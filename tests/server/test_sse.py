"""Events from a template are, byte for byte, what encoding the whole record gives; their way past the middleware."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.openai.protocol import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
    PromptTokensDetails,
    Usage,
)
from server.openai.sse import TEXT, Template, event
from server.outside import Direct, direct_send

USAGE = Usage(
    prompt_tokens=1, completion_tokens=2, total_tokens=3, prompt_tokens_details=PromptTokensDetails(cached_tokens=0)
)


def completion(text: str, name: str, usage: object) -> msgspec.Struct:
    choice = CompletionChoice(index=3, text=text)
    return Completion(id=name, created=5, model=name, choices=[choice], usage=usage)  # type: ignore[arg-type]


def chat(text: str, name: str, usage: object) -> msgspec.Struct:
    choice = ChatChunkChoice(index=3, delta=ChatDelta(content=text))
    return ChatChunk(id=name, created=5, model=name, choices=[choice], usage=usage)  # type: ignore[arg-type]


@pytest.mark.parametrize("record", [completion, chat])
@pytest.mark.parametrize("name", ["cmpl-1", TEXT, f'"{TEXT}"'])
@pytest.mark.parametrize("usage", [None, msgspec.UNSET, USAGE])
@pytest.mark.parametrize(
    "text", ["word", " ", 'a "quote" \\ and\n\r\t\0\x7f', "Ελλάς 🐈 \u2028", TEXT, "data: [DONE]\n\n"]
)
def test_a_template_writes_what_the_record_would(
    record: Callable[[str, str, object], msgspec.Struct], name: str, usage: object, text: str
) -> None:
    template = Template(event(record(TEXT, name, usage)))
    assert template.event(text) == event(record(text, name, usage))


@pytest.mark.anyio
@pytest.mark.parametrize("outermost", [True, False])
async def test_a_body_goes_past_the_middleware_if_the_way_is_known(outermost: bool) -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await direct_send(scope, send)({"type": "http.response.body"})

    async def between(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            seen.append("between")
            await send(message)

        await app(scope, receive, noting)

    async def receive() -> Message:
        raise AssertionError("nothing is asked")

    async def send(message: Message) -> None:
        seen.append(message["type"])

    found = Direct(between) if outermost else between
    await found({"type": "http"}, receive, send)
    assert seen == [*([] if outermost else ["between"]), "http.response.body"]
