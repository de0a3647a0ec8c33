"""Web pages: which ones may call, what a browser is told before it asks, and what a page can read."""

from __future__ import annotations

import pytest

from tests.server.conftest import client_of, make_service
from tests.server.fake_engine import FakeEngine
from tests.server.test_errors import CHAT, COMPLETIONS, error_of

pytestmark = pytest.mark.anyio
PAGE = "https://page.example"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_it_is_closed_by_default(client) -> None:
    assert (await client.options(COMPLETIONS, headers=PREFLIGHT)).status_code == 405
    answer = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"Origin": PAGE})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(("origins", "told"), [((PAGE,), PAGE), (("*",), "*"), (('["https://a.example", "*"]',), "*")])
async def test_a_page_that_is_named_may_call(origins: tuple[str, ...], told: str) -> None:
    async with client_of(make_service(FakeEngine(), api_key=("key",), allowed_origins=origins)) as client:
        leave = await client.options(CHAT, headers=PREFLIGHT)
        assert leave.status_code == 200
        assert leave.headers["access-control-allow-origin"] == told
        assert leave.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in leave.headers["access-control-allow-methods"]
        refused = await client.post(COMPLETIONS, json={"prompt": "x"}, headers={"Origin": PAGE})
        assert error_of(refused, 401)["code"] == "invalid_api_key"
        assert refused.headers["access-control-allow-origin"] == told
        headers = {"Origin": PAGE, "Authorization": "Bearer key"}
        body = {"prompt": "x", "stream": True, "max_tokens": 2}
        answer = await client.post(COMPLETIONS, json=body, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, told)
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]


async def test_other_pages_methods_and_headers_may_not() -> None:
    options = {"allowed_origins": (PAGE,), "allowed_methods": ("POST",), "allowed_headers": ("Authorization",)}
    async with client_of(make_service(FakeEngine(), **options)) as client:
        for changes in (
            {"Origin": "https://other.example"},
            {"Access-Control-Request-Method": "GET"},
            {"Access-Control-Request-Headers": "x-strange"},
        ):
            assert (await client.options(CHAT, headers=PREFLIGHT | changes)).status_code == 400
        other = await client.get("/v1/models", headers={"Origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_credentials_are_for_pages_that_are_named() -> None:
    options = {"allowed_origins": (PAGE,), "allow_credentials": True}
    async with client_of(make_service(FakeEngine(), **options)) as client:
        leave = await client.options(CHAT, headers=PREFLIGHT)
        assert leave.headers["access-control-allow-credentials"] == "true"
        assert leave.headers["access-control-allow-origin"] == PAGE
