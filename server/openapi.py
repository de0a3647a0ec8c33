"""The OpenAPI document, made from the pages of the app and the records that they read and answer with.

Owns how a page is described. What a field may hold comes from the record's types alone, so that the document cannot
say more or less than what is decoded.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from jaxserve import __version__
from server.errors import ErrorReply

type Answer = Callable[[Request], Awaitable[ASGIApp]]
type Json = bool | int | float | str | list["Json"] | dict[str, "Json"] | None
"""msgspec's own schemas are made of these too."""

_REFERENCE = "#/components/schemas/{name}"
_READING = (400, 413, 415)
"""What a body can be refused with."""


@dataclass(frozen=True, slots=True)
class Page:
    """A route: what it takes and what it says. Paths are written as Starlette writes them."""

    path: str
    methods: tuple[Literal["GET", "POST"], ...]
    answer: Answer
    summary: str
    takes: type | None = None
    """The record of the request's body."""
    refused: tuple[str, ...] = ()
    """Fields that are refused by name."""
    gives: type | None = None
    """The record of the answer's body; None: an empty body, or `text`."""
    text: bool = False
    streams: type | None = None
    """The record in each event of a streamed answer."""
    errors: tuple[int, ...] = ()
    """Statuses besides those of every page, each with the error shape."""
    unwell: type | None = None
    """The record of a 503 that is no error."""
    open: bool = False
    """Answers without a key."""


def document(pages: Sequence[Page], *, url: str, keys: bool, model: str) -> bytes:
    """The document as JSON.

    `url` is the path that a proxy shows the server under; `keys`: they are asked for; `model`: an example of a name.
    """
    paths: dict[str, dict[str, Json]] = {}
    for page in pages:
        for method in page.methods:
            paths.setdefault(_path(page), {})[method.lower()] = _operation(page, method, keys, model)
    components: dict[str, Json] = {"schemas": _schemas(pages)}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return msgspec.json.encode(
        {
            "openapi": "3.2.0",
            "info": {"title": "jaxserve", "version": __version__, "description": "Open models through OpenAI's API."},
            "servers": [{"url": url or "/"}],
            "paths": paths,
            "components": components,
        }
    )


def _path(page: Page) -> str:
    return page.path.replace(":path}", "}")


def _parameters(page: Page, model: str) -> list[Json]:
    names = [part[1:-1] for part in _path(page).split("/") if part.startswith("{")]
    text: Json = {"type": "string"}
    return [{"name": name, "in": "path", "required": True, "schema": text, "example": model} for name in names]


def _operation(page: Page, method: str, keys: bool, model: str) -> Json:
    found: dict[str, Json] = {
        "summary": page.summary,
        "operationId": f"{method} {page.path}",
        "responses": _responses(page, keys),
    }
    if parameters := _parameters(page, model):
        found["parameters"] = parameters
    if page.takes is not None:
        body: dict[str, Json] = {"required": True, "content": _json(page.takes)}
        if page.refused:
            body["description"] = f"Refused unless they change nothing: {', '.join(sorted(page.refused))}."
        found["requestBody"] = body
    if keys and not page.open:
        found["security"] = [{"key": []}]
    return found


def _responses(page: Page, keys: bool) -> dict[str, Json]:
    statuses = {*page.errors, *(_READING if page.takes else ()), *(() if page.open or not keys else (401,))}
    found: dict[str, Json] = {"200": _answer(page)}
    for status in sorted(statuses):
        found[str(status)] = _response(HTTPStatus(status).phrase, _json(ErrorReply))
    if page.unwell is not None:
        found["503"] = _response("not ready", _json(page.unwell))
    return found


def _answer(page: Page) -> Json:
    content: dict[str, Json] = {}
    if page.gives is not None:
        content |= _json(page.gives)
    if page.text:
        content["text/plain"] = {"schema": {"type": "string"}}
    if page.streams is not None:
        content["text/event-stream"] = {"itemSchema": _event(page.streams)}
    return _response("the answer", content)


def _event(record: type) -> Json:
    """What `stream: true` is answered with, an event at a time."""
    said: list[Json] = [_reference(record), _reference(ErrorReply)]
    piece: Json = {"contentMediaType": "application/json", "contentSchema": {"anyOf": said}}
    end: Json = {"const": "[DONE]"}
    data: Json = {"type": "string", "anyOf": [piece, end]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _response(description: str, content: dict[str, Json]) -> Json:
    return {"description": description, "content": content} if content else {"description": description}


def _json(record: type) -> dict[str, Json]:
    return {"application/json": {"schema": _reference(record)}}


def _reference(record: type) -> Json:
    return {"$ref": _REFERENCE.format(name=record.__name__)}


def _schemas(pages: Sequence[Page]) -> Json:
    records = {r: None for p in pages for r in (p.takes, p.gives, p.streams, p.unwell) if r is not None}
    found = msgspec.json.schema_components((*records, ErrorReply), schema_hook=_anything, ref_template=_REFERENCE)[1]
    return dict(sorted(found.items()))


def _anything(kind: type) -> dict[str, Json]:
    """The schema of a JSON value that is only passed on."""
    if kind is object:
        return {"description": "any JSON value"}
    raise NotImplementedError
