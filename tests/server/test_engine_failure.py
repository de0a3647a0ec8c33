"""A device that fails under the real engine: every open request hears of it, and the process ends with an error."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from jaxserve import AsyncEngine
from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine import Bounds, Engine
from jaxserve.host.scheduler import Limits, Scheduler
from jaxserve.plan import StepPlan
from server.serving import Started, serve
from tests.fake_executor import VOCAB, FakeExecutor, FakeFlight
from tests.server.fake_engine import ByteStream, FakeTokenizer, wait_for
from tests.server.test_command import ROOT, free_port

SERVE = "import sys; from tests.server.test_engine_failure import serve_until_failure; sys.exit(serve_until_failure())"
STEPS = 30


class Vocabulary(FakeTokenizer):
    def stream(self, *, skip_special_tokens: bool, prompt: object) -> ByteStream:
        return ByteStream(skip_special_tokens)

    def token_text(self, token: int) -> str:
        return chr(token)


class Failing(FakeExecutor):
    """Works for some steps."""

    def launch(self, plan: StepPlan) -> FakeFlight:
        if len(self.steps) == STEPS:
            raise RuntimeError("the device is gone")
        return super().launch(plan)


@dataclass(frozen=True)
class Served:
    engine: Engine
    tokenizer: Vocabulary = field(default_factory=Vocabulary)
    names: tuple[str, ...] = ("toy",)
    default_params: dict[str, object] = field(default_factory=dict)


def start(config: EngineConfig, **_: object) -> Started:
    limits = Limits(rows=4, tokens=32, page=4, pages=(512,), windows=(None,))
    bounds = Bounds(1000, VOCAB, 5, (), False, 0, 4, 8)
    engine = Engine(Scheduler(limits), Failing(4), Vocabulary(), bounds)
    return Started(AsyncEngine(Served(engine)), config)  # type: ignore[arg-type]


def serve_until_failure() -> int:
    """In a process of its own."""
    return serve(EngineConfig(served_model_name=("toy",)), ServerConfig(host="127.0.0.1", port=int(sys.argv[1])), start)


def test_a_device_that_fails_ends_every_request_and_the_process() -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(port)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip

    def health() -> int:
        try:
            return httpx.get(f"{url}/health", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def ask(i: int) -> httpx.Response:
        body = {"prompt": [i + 1], "max_tokens": 500, "stream": i % 2 == 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=30)

    try:
        wait_for(lambda: health() == 200, 30)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(8)))
        assert health() in (503, 0)
        for answer in answers:
            assert '"code":"engine_dead"' in answer.text
            assert answer.status_code == 503 or answer.text.endswith("data: [DONE]\n\n")
        _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "RuntimeError: the device is gone" in err
    finally:
        process.kill()
        process.communicate()
