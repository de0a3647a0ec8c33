"""The search for a Python that `make install` begins with."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _find_python(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/find-python where every python on PATH fails to start, as an inactive pyenv shim does."""
    shims = folder / "shims"
    shims.mkdir()
    for name in ("python3.12", "python3.13", "python3"):
        (shims / name).write_text("#!/bin/sh\nexit 127\n")
        (shims / name).chmod(0o755)
    search = {"PATH": f"{shims}:{os.environ['PATH']}", "PYENV_ROOT": str(folder / "pyenv"), "HOME": str(folder)}
    return subprocess.run(
        [ROOT / "scripts" / "find-python"], env=search | environment, capture_output=True, text=True, timeout=60
    )


def test_without_python_it_says_what_to_install(tmp_path: Path):
    done = _find_python(tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    for remedy in ("Python 3.12 or newer", "apt install", "brew install", "pyenv install 3.12", "PYTHON="):
        assert remedy in done.stderr


@pytest.mark.parametrize("version", ["3.12.1", "3.13.0"])
def test_finds_a_version_of_pyenv_that_is_not_active(tmp_path: Path, version: str):
    python = tmp_path / "pyenv" / "versions" / version / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert _find_python(tmp_path).stdout.strip() == str(python)


def test_the_named_python_comes_first(tmp_path: Path):
    assert _find_python(tmp_path, PYTHON=sys.executable).stdout.strip() == sys.executable
