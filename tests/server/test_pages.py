"""Models, tokenizing, versions, metrics, keys and ids."""

from __future__ import annotations

import httpx
import pytest

import jaxserve
from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import BOS, USER, FakeEngine
from tests.server.test_errors import error_of

pytestmark = pytest.mark.anyio


async def test_models_are_listed_under_every_name(client: httpx.AsyncClient) -> None:
    found = (await client.get("/v1/models")).json()
    assert found["object"] == "list"
    assert [m["id"] for m in found["data"]] == ["toy", "alias"]
    model = found["data"][0]
    assert (model["object"], model["owned_by"], model["parent"], model["max_model_len"]) == (
        "model",
        "jaxserve",
        None,
        1024,
    )
    assert model["root"] == "smollm2-135m-instruct"
    assert isinstance(model["created"], int)
    assert model["permission"][0]["object"] == "model_permission"
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"


async def test_a_models_name_may_hold_slashes() -> None:
    service = make_service(FakeEngine())
    service.names = ("org/model",)
    async with client_of(service) as client:
        assert (await client.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await client.get("/v1/models/org%2Fmodel")).json()["id"] == "org/model"


async def test_text_to_tokens_and_back(client) -> None:
    found = (await client.post("/tokenize", json={"prompt": "hi"})).json()
    assert found == {"count": 3, "max_model_len": 1024, "tokens": [BOS, 104, 105], "token_strs": None}
    found = (
        await client.post("/tokenize", json={"prompt": "é", "add_special_tokens": False, "return_token_strs": True})
    ).json()
    assert found["token_strs"] == ["bytes:\\xc3", "bytes:\\xa9"]
    back = (await client.post("/detokenize", json={"tokens": [BOS, 104, 105]})).json()
    assert back == {"prompt": "<s>hi"}


async def test_messages_to_tokens(client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    found = (await client.post("/tokenize", json={"messages": messages})).json()
    assert found["tokens"][0] == USER
    without = (await client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False})).json()
    assert without["count"] == found["count"] - len("assistant:") - 1


async def test_tokenizing_refuses_what_it_cannot_do(client) -> None:
    for body in ({}, {"prompt": "a", "messages": []}, {"messages": []}):
        error_of(await client.post("/tokenize", json=body), 400)
    for tokens in ([259], [-1], ["a"], [10**30]):
        assert error_of(await client.post("/detokenize", json={"tokens": tokens}), 400)["param"] == "tokens"


async def test_version_and_metrics(client) -> None:
    assert (await client.get("/version")).json() == {"version": jaxserve.__version__}
    metrics = await client.get("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'jaxserve:num_requests_running{engine="0",model_name="toy"} 0.0' in metrics.text


async def test_ids_go_in_and_out(client) -> None:
    given = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": "abc"})
    assert given.headers["x-request-id"] == "abc"
    assert given.json()["id"] == "cmpl-abc"
    for unfit in ("x" * 129, "ü"):
        made = await client.post("/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": unfit.encode()})
        assert made.headers["x-request-id"] != unfit
    assert (await client.get("/nowhere")).headers["x-request-id"]


KEYS = ("secret-key", "zweiter-schlüssel")
CLOSED = (
    "/v1/models", "/v1/completions", "//v1/completions", "/v1//completions", "/V1/completions", "/v1/completions/",
    "/%76ersion", "/version", "/tokenize", "/detokenize", "/", "/nowhere", "/health/", "/metrics/x", "/invocations",
)  # fmt: skip


@pytest.mark.parametrize("path", CLOSED)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_every_path_is_closed_without_a_key(path: str, method: str) -> None:
    async with client_of(make_service(FakeEngine(), api_key=KEYS)) as client:
        response = await client.request(method, path)
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_two_paths_are_open() -> None:
    async with client_of(make_service(FakeEngine(), api_key=KEYS)) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret-key", 200), ("bearer secret-key", 200), ("BEARER  secret-key ", 200),
        ("Bearer zweiter-schlüssel", 200), ("Bearer secret-ke", 401), ("Bearer secret-keyx", 401), ("Bearer ", 401),
        ("Bearer", 401), ("secret-key", 401), ("Basic secret-key", 401), ("Bearer SECRET-KEY", 401), ("", 401),
    ],
)  # fmt: skip
async def test_keys_are_compared_as_they_are(header: str, status: int) -> None:
    async with client_of(make_service(FakeEngine(), api_key=KEYS)) as client:
        response = await client.get("/v1/models", headers={"Authorization": header.encode()})
        assert response.status_code == status


async def test_any_key_will_do_when_none_is_set(client) -> None:
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer whatever"})).status_code == 200
