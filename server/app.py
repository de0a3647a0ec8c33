"""The Starlette app: routes, who may use them, and the pages that machines poll."""

from __future__ import annotations

from collections.abc import Callable

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
from server.errors import ApiError, handle
from server.ids import RequestIds
from server.openai.chat import chat_completions
from server.openai.completions import completions
from server.openai.models import list_models, retrieve_model
from server.openai.tokenize import detokenize, tokenize
from server.racing import ClientGone
from server.service import Service


class Health(Struct, frozen=True):
    """What /health says while it is not 200."""

    status: str
    stage: str
    progress: float


class Version(Struct, frozen=True):
    version: str


def build_app(service: Service, registry: CollectorRegistry) -> ASGIApp:
    """The whole app, for any ASGI server. `registry` holds what /metrics shows."""
    app = Starlette(
        routes=[
            Route("/health", health, methods=["GET"]),
            Route("/metrics", _metrics(registry), methods=["GET"]),
            Route("/version", version, methods=["GET"]),
            Route("/v1/models", list_models, methods=["GET"]),
            Route("/v1/models/{name:path}", retrieve_model, methods=["GET"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
        ],
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
    return RequestIds(ApiKeys(app, service.server.api_key))


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


def _not_well(state: Health) -> Response:
    return Response(msgspec.json.encode(state), 503, {"Retry-After": "1"}, media_type="application/json")


def _metrics(registry: CollectorRegistry) -> Callable[[Request], Response]:
    def metrics(request: Request) -> Response:
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": kind})

    return metrics


async def _nobody_there(_request: Request, _error: Exception) -> Response:
    """Never arrives: the client has left. 499 is what logs of other servers call it."""
    return Response(status_code=499)
