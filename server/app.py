"""The Starlette app: routes, who may use them, and the pages that machines poll."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from jaxserve import __version__
from jaxserve.types import EngineDead, InvalidRequest
from server.auth import ApiKeys
from server.cors import allow_origins
from server.errors import ApiError, handle
from server.ids import RequestIds
from server.openai.chat import chat_completions
from server.openai.completions import completions
from server.openai.fields import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, REFUSED_IN_TOKENIZE
from server.openai.models import list_models, retrieve_model
from server.openai.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
)
from server.openai.tokenize import detokenize, tokenize
from server.openapi import Answer, Page, document
from server.outside import Counted, Direct, UnderPath
from server.racing import ClientGone
from server.service import Service


class Health(Struct, frozen=True):
    """What /health says while it is not 200."""

    status: str
    stage: str
    progress: float


class Version(Struct, frozen=True):
    version: str


class Load(Struct, frozen=True):
    server_load: int
    """Requests to models that are being answered."""


_ASKING = (404, 503)
"""Statuses of what names a model."""


def build_app(service: Service, registry: CollectorRegistry) -> ASGIApp:
    """The whole app, for any ASGI server. `registry` holds what /metrics shows."""
    options = service.server
    pages = _pages(service, registry)
    if not options.disable_fastapi_docs:
        described = document(pages, url=options.root_path, keys=bool(options.api_key), model=service.names[0])
        pages.append(Page("/openapi.json", ("GET",), _constant(described), "this document"))
    app = Starlette(
        routes=[Route(page.path, page.answer, methods=list(page.methods)) for page in pages],
        exception_handlers={
            ApiError: handle,
            InvalidRequest: handle,
            EngineDead: handle,
            HTTPException: handle,
            ClientGone: _nobody_there,
            Exception: handle,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = service
    found: ASGIApp = ApiKeys(app, options.api_key, frozenset(page.path for page in pages if page.open))
    if options.allowed_origins:
        found = allow_origins(found, options)
    found = RequestIds(found, shown=options.enable_request_id_headers)
    if options.enable_server_load_tracking:
        found = Counted(found, service)
    if options.root_path:
        found = UnderPath(found, options.root_path)
    return Direct(found)


def _pages(service: Service, registry: CollectorRegistry) -> list[Page]:
    found = [
        Page("/health", ("GET",), health, "whether requests are served", unwell=Health, open=True),
        Page("/ping", ("GET", "POST"), health, "the same as /health", unwell=Health, open=True),
        Page("/metrics", ("GET",), _metrics(registry), "metrics for Prometheus", text=True, open=True),
        Page("/version", ("GET",), version, "the version", gives=Version),
        Page("/v1/models", ("GET",), list_models, "the models", gives=ModelList, errors=(503,)),
        Page("/v1/models/{name:path}", ("GET",), retrieve_model, "a model", gives=ModelCard, errors=_ASKING),
        Page(
            "/v1/completions",
            ("POST",),
            completions,
            "continues prompts",
            takes=CompletionRequest,
            refused=tuple(REFUSED_IN_COMPLETIONS),
            gives=Completion,
            streams=Completion,
            errors=_ASKING,
        ),
        Page(
            "/v1/chat/completions",
            ("POST",),
            chat_completions,
            "answers messages",
            takes=ChatRequest,
            refused=tuple(REFUSED_IN_CHAT),
            gives=ChatCompletion,
            streams=ChatChunk,
            errors=_ASKING,
        ),
        Page(
            "/tokenize",
            ("POST",),
            tokenize,
            "text or messages to token ids",
            takes=TokenizeRequest,
            refused=tuple(REFUSED_IN_TOKENIZE),
            gives=TokenizeReply,
            errors=_ASKING,
        ),
        Page(
            "/detokenize",
            ("POST",),
            detokenize,
            "token ids to text",
            takes=DetokenizeRequest,
            gives=DetokenizeReply,
            errors=_ASKING,
        ),
    ]
    if service.server.enable_server_load_tracking:
        found.append(Page("/load", ("GET",), load, "how much is being answered", gives=Load))
    return found


async def health(request: Request) -> Response:
    """200 with nothing when requests are served, else 503 with how far loading is."""
    service: Service = request.app.state.service
    if service.dead is not None:
        return _not_well(Health("dead", service.stage, 0.0))
    if service.engine is None:
        return _not_well(Health("loading", service.stage, round(service.progress, 3)))
    return Response()


async def version(_request: Request) -> Response:
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")


async def load(request: Request) -> Response:
    service: Service = request.app.state.service
    return Response(msgspec.json.encode(Load(service.answering)), media_type="application/json")


def _constant(body: bytes) -> Answer:
    async def answer(_request: Request) -> Response:
        return Response(body, media_type="application/json")

    return answer


def _not_well(state: Health) -> Response:
    return Response(msgspec.json.encode(state), 503, {"Retry-After": "1"}, media_type="application/json")


def _metrics(registry: CollectorRegistry) -> Answer:
    async def metrics(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    return metrics


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    """Never arrives: the client has left. 499 is what logs of other servers call it."""
    return Response(status_code=499)
