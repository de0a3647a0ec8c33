"""The rooms import in one direction only. The contracts themselves are in pyproject.toml."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve

ROOT = Path(__file__).parents[2]


def test_import_contracts_hold():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("module", ["jaxserve", "jaxserve.types", "jaxserve.config", "jaxserve.host"])
def test_host_half_loads_no_jax(module: str):
    """Importing a module runs its packages' __init__ files too, which the contracts do not follow."""
    program = f"""
import importlib, pkgutil, sys
module = importlib.import_module({module!r})
if {module!r} == "jaxserve.host":
    for found in pkgutil.walk_packages(module.__path__, "jaxserve.host."):
        importlib.import_module(found.name)
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & {{"jax", "jaxlib", "flax", "orbax", "torch"}}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_no_public_name_is_a_modules_too():
    """Importing a submodule sets it on its package, where it would hide what is found when it is first asked for."""
    public = set(jaxserve.__all__)
    assert not public & {found.name for found in pkgutil.iter_modules(jaxserve.__path__)}
