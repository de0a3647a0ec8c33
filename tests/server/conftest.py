"""Clients of an app over the fake engine: in the process, and over a real socket."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import uvicorn

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.observe.metrics import Metrics
from server.app import build_app
from server.service import Service
from server.serving import bind
from tests.server.fake_engine import FakeEngine, wait_for


def make_service(engine: FakeEngine | None, **server: object) -> Service:
    service = Service(EngineConfig(served_model_name=("toy", "alias")), ServerConfig(**server))  # type: ignore[arg-type]
    service.engine = engine
    return service


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def client_of(service: Service) -> httpx.AsyncClient:
    app = build_app(service, Metrics("toy").registry())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(make_service(engine)) as found:
        yield found


class Live:
    """A server on a real port, in a thread."""

    def __init__(self, service: Service) -> None:
        self.service = service
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = build_app(service, Metrics("toy").registry())
        self._server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, ws="none"))
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        wait_for(lambda: self._server.started)
        gc.collect()
        gc.freeze()  # what other tests left in this process would hold this server up at every full collection

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        gc.unfreeze()


@pytest.fixture
def live() -> Iterator[Callable[[Service], Live]]:
    running: list[Live] = []

    def start(service: Service) -> Live:
        running.append(Live(service))
        return running[-1]

    yield start
    for server in running:
        server.stop()
