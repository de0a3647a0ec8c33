"""The `jaxserve` command as a process: what it imports, how it starts, how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jaxserve import __version__
from tests.server.conftest import make_service
from tests.server.fake_engine import FakeEngine, wait_for

ROOT = Path(__file__).parents[2]
COMMAND = "import sys; from server.cli import main; sys.exit(main())"
WITHOUT_JAX = f"import sys; sys.modules['jax'] = None\n{COMMAND}"
SERVE_FAKE = """
import json, sys, time
from jaxserve.config import EngineConfig, ServerConfig
from server.serving import Started, serve
from tests.server.fake_engine import FakeEngine

class Dying(FakeEngine):
    async def generate(self, prompt, *rest, **more):
        if list(prompt[1:]) == list(b"die"):
            self.dead = RuntimeError("the device is gone")
        async for output in FakeEngine.generate(self, prompt, *rest, **more):
            yield output

def start(config, *, progress, observers):
    seconds = float(sys.argv[2])
    progress("pretending", 0.5)
    time.sleep(seconds)
    if sys.argv[3] == "fail":
        raise ValueError("the model is no model; name another one")
    length = 128 if sys.argv[3] == "short" else 1024
    return Started(Dying(delay=0.01, max_model_len=length), config)

more = json.loads(sys.argv[5])
server = ServerConfig(host="127.0.0.1", port=int(sys.argv[1]), shutdown_timeout=float(sys.argv[4]), **more)
sys.exit(serve(EngineConfig(served_model_name=("toy",)), server, start))
"""


def run(code: str, *words: str, cwd: Path | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True, text=True, cwd=cwd, env=environment, input=stdin, timeout=60, check=False,
    )  # fmt: skip


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Process:
    """A server process over the fake engine."""

    def __init__(self, seconds: float, kind: str, patience: float, options: dict[str, object]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [str(self.port), str(seconds), kind, str(patience), json.dumps(options)]
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE_FAKE, *words],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def status(self) -> int:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def ended(self, seconds: float = 10) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def begin(seconds: float = 0.0, kind: str = "work", patience: float = 5, **options: object) -> Process:
        running.append(Process(seconds, kind, patience, options))
        return running[-1]

    yield begin
    for one in running:
        one.process.kill()
        one.process.communicate()


def test_the_command_imports_nothing_large_before_the_process_is_as_it_should_be() -> None:
    assert (
        run("import sys, server.cli; print({'jaxserve', 'msgspec', 'starlette'} & sys.modules.keys())").stdout
        == "set()\n"
    )


def test_nothing_is_collected_while_an_engine_starts() -> None:
    failing = """
import gc
from jaxserve.config import EngineConfig, ServerConfig
from server.serving import serve

def start(config, *, progress, observers):
    print(gc.isenabled())
    raise ValueError("the model is no model")

serve(EngineConfig(), ServerConfig(host="127.0.0.1", port=0), start)
print(gc.isenabled())
"""
    assert run(failing).stdout == "False\nTrue\n"


def test_what_the_streams_of_a_step_make_starts_no_collection_once_an_engine_is_loaded() -> None:
    counting = """
import gc
from server.serving import keep_loaded

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

keep_loaded()
before, living = collections(), [[] for _ in range(20_000)]
print(collections() - before, gc.get_freeze_count() > 0)
"""
    assert run(counting).stdout == "0 True\n"


def test_help_version_and_chat_need_no_jax() -> None:
    assert run(WITHOUT_JAX, "--version").stdout == f"jaxserve {__version__}\n"
    for words in (("--help",), ("serve", "--help"), ("chat", "--help"), ()):
        done = run(WITHOUT_JAX, *words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: jaxserve")
    done = run(WITHOUT_JAX, "chat", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:1" in done.stderr


def test_an_unknown_command_is_an_error() -> None:
    done = run(WITHOUT_JAX, "sevre")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


def test_the_installed_command_is_not_confused_by_the_folder_it_runs_in(tmp_path: Path) -> None:
    command = Path(sys.executable).with_name("jaxserve")
    if not command.exists():
        pytest.skip("the package is not installed")
    (tmp_path / "server.py").write_text("raise SystemExit('the wrong server')")
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve" / "__init__.py").write_text("raise SystemExit('the wrong jaxserve')")
    done = subprocess.run([command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"jaxserve {__version__}\n")


def test_a_busy_port_is_told_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        done = run(WITHOUT_JAX, "serve", "--host", "127.0.0.1", "--port", str(port))
    assert done.returncode == 1
    assert f"error: port {port} is in use; " in done.stderr


def test_it_listens_at_once_and_says_how_far_it_is(start) -> None:
    server = start(seconds=2.0)
    wait_for(lambda: server.status() == 503)
    assert time.monotonic() - server.began < 2.0
    assert httpx.get(f"{server.url}/health").json() == {"status": "loading", "stage": "pretending", "progress": 0.5}
    wait_for(lambda: server.status() == 200)
    server.process.send_signal(signal.SIGTERM)
    code, out, err = server.ended()
    assert code == 0, err
    assert re.search(r"^toy is ready after \d\.\d s on " + re.escape(server.url), out, re.MULTILINE)
    assert f"jaxserve chat --url {server.url}" in out


def test_the_lines_it_prints_work_as_they_are(start) -> None:
    server = start(kind="short")
    wait_for(lambda: server.status() == 200)
    server_out = server.process.stdout
    assert server_out is not None
    lines = [server_out.readline() for _ in range(5)]
    [curl] = [line for line in lines if "curl" in line]
    done = subprocess.run(curl, shell=True, capture_output=True, text=True, timeout=30, check=False)
    assert '"role":"assistant"' in done.stdout, done
    chat = run(COMMAND, "chat", "--url", server.url, "--max-tokens", "5", stdin="hello\n\nagain\n")
    assert chat.returncode == 0, chat.stderr
    assert len(chat.stdout) == 12


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_it_at_once(start, number: signal.Signals) -> None:
    server = start(seconds=60)
    wait_for(lambda: server.status() == 503)
    server.process.send_signal(number)
    code, _, err = server.ended(5)
    assert code == 0, err


def stream_from(server: Process, tokens: int) -> httpx.Response:
    body = {"prompt": "a", "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_a_signal_lets_running_requests_finish(start) -> None:
    server = start()
    wait_for(lambda: server.status() == 200)
    body = {"prompt": "a", "max_tokens": 100, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2] == "data: [DONE]"
    assert sum('"text"' in line for line in rest) == 99
    assert server.ended()[0] == 0


def test_a_signal_ends_requests_that_take_too_long(start) -> None:
    server = start(patience=0.5)
    wait_for(lambda: server.status() == 200)
    body = {"prompt": "a", "max_tokens": 1000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"code":"shutting_down"' in rest[-2]
    assert server.ended()[0] == 0


def test_refusals_reach_the_metrics(start) -> None:
    server = start(max_num_queued_tokens=1)
    wait_for(lambda: server.status() == 200)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": ["a"] * 300}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
    metrics = httpx.get(f"{server.url}/metrics").text
    assert re.search(r'admission_rejections_total\{.*reason="max_num_queued_tokens"\} 1\.0', metrics)


def test_it_listens_on_a_unix_socket_and_takes_over_an_old_one(start, tmp_path: Path) -> None:
    path = tmp_path / "jaxserve.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    server = start(uds=str(path))
    assert server.process.stdout is not None
    lines = [server.process.stdout.readline() for _ in range(5)]
    [curl] = [line for line in lines if "curl" in line]
    assert f"--unix-socket {path}" in curl
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as client:
        assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    again = start(uds=str(path))
    code, _, err = again.ended()
    assert (code, f"error: cannot listen on {path}" in err) == (1, True)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """For 127.0.0.1, signed by itself: certificate and key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl to make a certificate")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    files = ["-out", str(cert), "-keyout", str(key)]
    subprocess.run([openssl, "req", "-x509", "-newkey", "rsa:2048", *names, *files], check=True, capture_output=True)
    return cert, key


def test_it_speaks_https(start, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    server = start(ssl_certfile=str(cert), ssl_keyfile=str(key))
    url = server.url.replace("http:", "https:")
    assert server.process.stdout is not None
    assert url in "".join(server.process.stdout.readline() for _ in range(5))
    trust = ssl.create_default_context(cafile=str(cert))
    assert httpx.get(f"{url}/health", verify=trust).status_code == 200
    assert server.status() == 0


def test_a_certificate_that_is_not_there_is_told(start, tmp_path: Path) -> None:
    code, _, err = start(ssl_certfile=str(tmp_path / "none.pem")).ended()
    assert (code, "error: the TLS key or certificate cannot be used" in err, "Traceback" in err) == (1, True, False)


def test_a_model_that_cannot_be_loaded_is_an_error(start) -> None:
    code, _, err = start(kind="fail").ended()
    assert code == 1
    assert "error: the model is no model; name another one" in err
    assert "Traceback" not in err


def test_an_engine_that_fails_takes_the_process_with_it(start) -> None:
    server = start()
    wait_for(lambda: server.status() == 200)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "die"}, timeout=30)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert server.status() in (503, 0)
    code, _, err = server.ended()
    assert code == 1
    assert "the device is gone" in err


def test_chat_shows_errors_of_the_server(live) -> None:
    server = live(make_service(FakeEngine(), api_key=("key",)))
    done = run(COMMAND, "chat", "--url", server.url, stdin="hi\n")
    assert (done.returncode, "send an API key" in done.stderr) == (1, True)
    done = run(COMMAND, "chat", "--url", f"{server.url}/v1", "--api-key", "key", "--max-tokens", "3", stdin="hi\n")
    assert (done.returncode, len(done.stdout)) == (0, 4)
    done = run(COMMAND, "chat", "--url", server.url, "--api-key", "key", "--max-tokens", "5000", stdin="hi\n")
    assert (done.returncode, "maximum context length" in done.stderr) == (1, True)


def test_chat_shows_what_the_model_thinks_and_does_not_send_it_back(live) -> None:
    engine = FakeEngine()
    engine.script = "<think>hm</think>yes"
    server = live(make_service(engine, reasoning_parser="deepseek_r1"))
    done = run(COMMAND, "chat", "--url", server.url, "--max-tokens", "30", stdin="hi\nand\n")
    assert (done.returncode, done.stdout.split()) == (0, ["hmyes", "hmyes"])
    assert "hm" not in engine.tokenizer.decode(engine.prompts[-1])
