"""The package that users install: what is in the wheel, and that its command starts from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    build = ["pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run([sys.executable, "-m", *build], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("jaxserve-*.whl")
    return built


def test_wheel_holds_every_module_and_nothing_else(wheel: Path):
    packages = [p for p in ("jaxserve", "server", "pallas_kernels") if (ROOT / p).exists()]
    sources = {p.relative_to(ROOT).as_posix() for name in packages for p in (ROOT / name).rglob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
        commands = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    assert {name for name in held if name.endswith(".py")} == sources
    assert {name.partition("/")[0] for name in held} == set(packages)
    assert "jaxserve = server.cli:main" in commands


def test_command_ignores_modules_of_the_folder_it_is_called_from(tmp_path: Path):
    """A user's own server.py or jaxserve/ must not take the place of ours.

    A console script has its own folder at the front of sys.path, never the current one, so nothing needs to be set
    (PYTHONSAFEPATH matters only for `python -m` and `python -c`). PYTHONPATH would put a folder in front; it is the
    user's to set, and is left out here.
    """
    (tmp_path / "server.py").write_text("raise SystemExit('the wrong server')\n")
    (tmp_path / "jaxserve").mkdir()
    (tmp_path / "jaxserve" / "__init__.py").write_text("raise SystemExit('the wrong jaxserve')\n")
    command = Path(sys.executable).with_name("jaxserve")
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run(
        [command, "serve", "--help"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "--max-model-len" in done.stdout
