"""The README's examples run as they stand there, against a server that was started from somebody else's folder."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
START_SECONDS = 240

# What a user's shell would have: no fake devices, and no folder in front of the installed packages.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PYTHONPATH")}


def _example(name: str) -> str:
    """The fenced block under the comment `<!-- test: name -->`."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, f"README.md has no example named {name}"
    return found[1]


@dataclass(frozen=True)
class Running:
    port: int
    log: Path

    def printed(self, word: str) -> str:
        """The line that the server printed for trying it, the one that holds `word`."""
        lines = [line.strip() for line in self.log.read_text().splitlines()]
        (found,) = [line for line in lines if re.match(rf"(\S*/)?{word} ", line)]
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the demo's launch file, started where a user's own server.py and jaxserve/ lie."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "server.py").write_text("raise SystemExit('the wrong server')\n")
    (folder / "jaxserve").mkdir()
    (folder / "jaxserve" / "__init__.py").write_text("raise SystemExit('the wrong jaxserve')\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
    options = ["--config", str(ROOT / "configs" / "smollm2-cpu.yaml"), "--port", str(number)]
    options += ["--max-model-len", "256"]  # ends the answers to requests that set no max_tokens
    command = [Path(sys.executable).with_name("jaxserve"), "serve", *options]
    running = Running(number, folder / "log.txt")
    with (
        running.log.open("w") as out,
        subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=out, stderr=out) as process,
    ):
        try:
            _wait_until_ready(running, process)
            yield running
        finally:
            process.terminate()


@pytest.fixture
def client(server: Running) -> str:
    """How the example for the openai package begins: what the ones after it go on with."""
    beginning, rest = _example("openai").split("stream = ", 1)
    assert rest
    return beginning.replace("localhost:8000", f"127.0.0.1:{server.port}")


def _wait_until_ready(running: Running, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, running.log.read_text()
        try:
            if httpx.get(f"http://127.0.0.1:{running.port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    pytest.fail(f"not ready after {START_SECONDS} s:\n{running.log.read_text()}")


def _run(*command: str, typed: str = "") -> str:
    done = subprocess.run(command, env=ENVIRONMENT, input=typed, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_offline(tmp_path: Path):
    """Both examples for Python, as the second one goes on with what the first one made."""
    script = tmp_path / "offline.py"
    script.write_text(_example("offline") + _example("structured-offline"))
    printed = _run(sys.executable, str(script))
    lines = [line for line in printed.splitlines() if line.startswith("Prompt: ")]
    assert len(lines) == 3
    assert all(re.fullmatch(r"Prompt: '.+', Generated text: ['\"].+['\"]", line) for line in lines)
    assert re.search(r"^Shaped: [A-Z][a-z]{2,12}, (19|20)[0-9]{2}$", printed, re.MULTILINE)


def test_curl(server: Running):
    answers = _run("bash", "-euc", _example("curl").replace("localhost:8000", f"127.0.0.1:{server.port}"))
    assert '"smollm2-135m-instruct"' in answers
    assert '"chat.completion"' in answers
    assert "Paris" in answers


def test_openai(server: Running, tmp_path: Path):
    script = tmp_path / "client.py"
    script.write_text(_example("openai").replace("localhost:8000", f"127.0.0.1:{server.port}"))
    assert "Paris" in _run(sys.executable, str(script))


def test_structured(client: str, tmp_path: Path):
    """The word is one of the choices, and the JSON has the schema's members."""
    script = tmp_path / "structured.py"
    script.write_text(client + _example("structured"))
    word, city = _run(sys.executable, str(script)).splitlines()
    assert word in ("positive", "negative")
    assert re.fullmatch(r"\{'city': .+, 'museums': \d+\}", city)


def test_tools(client: str, tmp_path: Path):
    """The call is the one that the tool's schema leaves."""
    script = tmp_path / "tools.py"
    script.write_text(client + _example("tools"))
    assert re.fullmatch(r'get_weather \{\s*"city":\s*"(Paris|Rome)"\s*\}\n', _run(sys.executable, str(script)))


def test_curl_line_that_the_server_prints(server: Running):
    assert '"chat.completion"' in _run("bash", "-euc", server.printed("curl"))


def test_chat_line_that_the_server_prints(server: Running):
    assert _run("bash", "-euc", server.printed("jaxserve"), typed="What is the capital of France?\n").strip()


def test_metrics_that_the_readme_names(server: Running):
    served = httpx.get(f"http://127.0.0.1:{server.port}/metrics").text
    named = re.findall(r"`(jaxserve:\w+)`", README)
    assert named
    assert [name for name in named if not re.search(rf"^{name}\b|^{name}_bucket", served, re.MULTILINE)] == []


def test_flags_that_the_readme_names():
    command = str(Path(sys.executable).with_name("jaxserve"))
    helped = _run(command, "serve", "--help") + _run(command, "plan", "--help")
    named = re.findall(r"`(--[a-z-]+)`", README)
    assert named
    assert [flag for flag in named if flag not in helped] == []


def test_first_screen_holds_the_two_commands():
    first_screen = "\n".join(README.splitlines()[:24])
    assert "make serve" in first_screen
    assert "make test" in first_screen


def test_links_lead_somewhere():
    targets = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert [target for target in targets if not (ROOT / target).exists()] == []
