"""The real engine behind a real socket: crowds that leave, bad requests, the end of the process.

One server process over a tiny checkpoint for the whole file; the last test stops it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.soak import Crowd, metrics_of, soak
from tests.device.engines import with_tokenizer
from tests.models.cases import Case
from tests.server.fake_engine import wait_for
from tests.server.test_command import COMMAND, ROOT, free_port

LENGTH, VOCAB = 64, 101
OPTIONS = "--token-buckets 64 --max-num-seqs 8 --block-size 8 --num-gpu-blocks-override 60 --dtype float32"
PLAIN = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Server:
    """`jaxserve serve` in a process of its own."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        words = ["serve", str(with_tokenizer(Case("llama2").directory)), "--host", "127.0.0.1", "--port", str(port)]
        words += ["--served-model-name", "tiny", "--metrics-prefix", "vllm", *OPTIONS.split()]
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def ready(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()[0]
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def post(self, path: str, body: dict[str, object], **more: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **more)  # type: ignore[arg-type]

    def empty(self) -> bool:
        return metrics_of(httpx.get(f"{self.url}/metrics").text).empty


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    server = Server()
    try:
        wait_for(server.ready, 120)
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def test_crowds_of_which_a_third_leaves(served: Server) -> None:
    async def rounds() -> list[int]:
        crowd = Crowd(clients=64, rounds=3, prompt=20, answer=40, vocab=VOCAB)
        return [one.left async for one in soak(served.url, crowd)]

    assert all(left > 0 for left in asyncio.run(rounds()))
    assert served.empty()


BAD: list[dict[str, object]] = [
    {"temperature": -1},
    {"temperature": 2.5},
    {"top_k": 0.5},
    {"top_k": -2},
    {"top_p": 0},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"seed": 2**64},
    {"seed": -(2**64)},
    {"n": 0},
    {"n": 1_000_000},
    {"max_tokens": 10**9},
    {"min_tokens": 10**9},
    {"logprobs": 21},
    {"prompt_logprobs": -2},
    {"logit_bias": {str(VOCAB): 1}},
    {"logit_bias": {"-1": 1}},
    {"allowed_token_ids": [VOCAB]},
    {"stop_token_ids": [VOCAB]},
    {"stop": ""},
    {"bad_words": ["t1 " * 100]},
    {"bad_words": ["x" * 5_000_000]},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [VOCAB]},
    {"prompt": [-1]},
    {"prompt": [10**30]},
    {"prompt": [1] * LENGTH},
    {"prompt": "t1 " * LENGTH},
    {"prompt": ["t1"] * 3000},
    {"priority": 1},
    {"cache_salt": ""},
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_told_so_and_change_nothing(served: Server, stream: bool) -> None:
    want = served.post("/v1/completions", PLAIN).json()["choices"][0]["text"]
    for bad in BAD:
        answer = served.post("/v1/completions", PLAIN | {"stream": stream} | bad)
        assert answer.status_code == 400, bad
        assert answer.json()["error"]["param"] in bad, bad
        assert len(answer.content) < 3000
    for raw in (b'{"prompt": "t1", "temperature": NaN}', b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b"{", b"[]"):
        answer = httpx.post(f"{served.url}/v1/completions", content=raw)
        assert answer.status_code == 400, raw
    assert served.post("/v1/completions", PLAIN).json()["choices"][0]["text"] == want
    assert served.empty()


def test_one_id_for_many_requests_never_crosses_answers(served: Server) -> None:
    def ask(i: int) -> str:
        body = PLAIN | {"prompt": [i, i + 1], "request_id": "same"}
        answer = served.post("/v1/completions", body, headers={"X-Request-Id": "same"})
        assert answer.headers["X-Request-Id"] == "same"
        return answer.json()["choices"][0]["text"]

    alone = [ask(i) for i in range(8)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, [*range(8)] * 2)) == alone * 2


def test_metrics_add_up_under_the_names_of_vllm(served: Server) -> None:
    def value(name: str, labels: str = "") -> float:
        page = httpx.get(f"{served.url}/metrics").text
        found = re.search(rf'^vllm:{name}\{{(?=.*model_name="tiny")(?=.*{labels}).*\}} (\S+)$', page, re.MULTILINE)
        assert found, name
        return float(found[1])

    names = ("prompt_tokens_total", "generation_tokens_total", "time_to_first_token_seconds_count")
    names += ("inter_token_latency_seconds_count", "e2e_request_latency_seconds_count")
    before = [value(name) for name in names]
    ended = value("request_success_total", 'finished_reason="length"')
    for _ in range(3):
        served.post("/v1/completions", PLAIN)
    wait_for(served.empty)
    after = [value(name) for name in names]
    assert [new - old for new, old in zip(after, before, strict=True)] == [9, 24, 3, 21, 3]
    assert value("request_success_total", 'finished_reason="length"') - ended == 3
    assert value("num_preemptions_total") >= 0
    assert value("recompiles_total") == 0


def test_a_signal_lets_streams_finish_and_ends_the_process(served: Server) -> None:
    body = PLAIN | {"max_tokens": 60, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        served.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    out, _ = served.process.communicate(timeout=30)
    assert served.process.returncode == 0, out
    assert "Traceback" not in out
