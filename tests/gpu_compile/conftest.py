"""The gate's evidence, compiled once a session in processes of their own, and what it says in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxserve.chips import can_compile

ROOT = Path(__file__).parents[2]
PROCESSES = 2
MISSING = "CUDA's compiler is not installed; `make gpu-compile` installs it and runs these tests"


@dataclass(frozen=True)
class Finding:
    """What a worker wrote of one program."""

    faults: dict[str, list[str]]
    launches: dict[str, int]
    temporary: int
    seconds: float


_FOUND = pytest.StashKey[dict[str, Finding]]()


@pytest.fixture(scope="session")
def evidence(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """Of every program, by name."""
    if not can_compile():
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("gpu_compile")
    files = [folder / f"{part}.json" for part in range(PROCESSES)]
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.gpu_compile.worker", str(part), str(PROCESSES), str(file)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part, file in enumerate(files)
    ]
    said = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES, "\n".join(said)[-4000:]
    found = {name: Finding(**data) for file in files for name, data in json.loads(file.read_text()).items()}
    request.config.stash[_FOUND] = found
    return found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    found = config.stash.get(_FOUND, {})
    if not found:
        return
    terminalreporter.section("launches on an H200")
    for name, one in found.items():
        if not name.startswith("toy"):
            counts = ", ".join(f"{what} {count}" for what, count in one.launches.items())
            terminalreporter.line(f"{name:32} {counts}, temporary {one.temporary / 2**20:.0f} MiB, {one.seconds:.1f} s")
