"""The OpenAPI document: every page is in it, with what it takes and says, and it can be turned off."""

from __future__ import annotations

import re

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from server.openai.protocol import ChatRequest, CompletionRequest
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio


async def document(**options: object) -> dict:
    async with client_of(make_service(FakeEngine(), **options)) as client:
        answer = await client.get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


async def test_every_page_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    routes: list[Route] = []
    create = Starlette.__init__

    def remember(self: Starlette, routes: list[Route], **more: object) -> None:
        kept.extend(routes)
        create(self, routes=routes, **more)  # type: ignore[arg-type]

    kept = routes
    monkeypatch.setattr(Starlette, "__init__", remember)
    found = await document(enable_server_load_tracking=True)
    paths = {(route.path.replace(":path", ""), m) for route in routes for m in route.methods or ()}
    described = {(path, method.upper()) for path, methods in found["paths"].items() for method in methods}
    assert described == {(p, m) for p, m in paths if m != "HEAD" and p != "/openapi.json"}


async def test_bodies_and_answers_are_described() -> None:
    found = await document()
    completion = found["paths"]["/v1/completions"]["post"]
    body = completion["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    assert "suffix" in completion["requestBody"]["description"]
    assert set(completion["responses"]) == {"200", "400", "404", "413", "415", "503"}
    for status in ("400", "404", "413", "415", "503"):
        schema = completion["responses"][status]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorReply"}
    assert set(completion["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    name = found["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert [(one["name"], one["in"], one["example"]) for one in name] == [("name", "path", "toy")]


@pytest.mark.parametrize("record", [CompletionRequest, ChatRequest])
async def test_every_field_that_is_decoded_is_described(record: type[msgspec.Struct]) -> None:
    schema = (await document())["components"]["schemas"][record.__name__]
    assert set(schema["properties"]) == {field.encode_name for field in msgspec.structs.fields(record)}
    [temperature, _] = schema["properties"]["temperature"]["anyOf"]
    assert temperature == {"type": "number", "minimum": 0, "maximum": 2}


async def test_every_reference_leads_somewhere() -> None:
    text = msgspec.json.encode(found := await document()).decode()
    names = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert names
    assert names <= set(found["components"]["schemas"])


async def test_keys_are_described_where_they_are_asked_for() -> None:
    async with client_of(make_service(FakeEngine(), api_key=("key",))) as client:
        error_of(await client.get("/openapi.json"), 401)
        found = (await client.get("/openapi.json", headers={"Authorization": "Bearer key"})).json()
    assert found["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    closed = {path for path, item in found["paths"].items() for one in item.values() if one.get("security")}
    assert set(found["paths"]) - closed == {"/health", "/ping", "/metrics"}
    assert "401" in found["paths"]["/tokenize"]["post"]["responses"]
    assert "securitySchemes" not in (await document())["components"]


async def test_it_can_be_turned_off_and_shown_under_a_path() -> None:
    async with client_of(make_service(FakeEngine(), disable_fastapi_docs=True)) as client:
        assert (await client.get("/openapi.json")).status_code == 404
    assert (await document(root_path="/llm"))["servers"] == [{"url": "/llm"}]
