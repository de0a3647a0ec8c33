"""GET /v1/models and /v1/models/{id}: every name that requests may use."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.openai.protocol import ModelCard, ModelList, ModelPermission
from server.service import Service


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    models = ModelList(data=[_card(service, name) for name in service.names])
    return Response(msgspec.json.encode(models), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    service: Service = request.app.state.service
    name = service.check_model(request.path_params["name"])
    return Response(msgspec.json.encode(_card(service, name)), media_type="application/json")


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=service.created,
        root=service.config.model,
        max_model_len=service.ready().max_model_len,
        permission=[ModelPermission(id=f"modelperm-{name}", created=service.created)],
    )
