"""The kernels compile for an H200 at full size, keep everything in registers, and copy nothing of the pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jaxserve.chips import can_compile
from pallas_kernels.paged_attention.cases import FULL, WIDE
from tests.gpu_compile.conftest import MISSING, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CASES = FULL | WIDE


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    if not can_compile():
        pytest.skip(MISSING)
    out = tmp_path_factory.mktemp("kernels") / "kernels.json"
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"} | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-m", "tests.gpu_compile.kernel_worker", str(out)]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", CASES)
def test_nothing_spills(compiled: dict[str, dict[str, object]], name: str) -> None:
    assert compiled[name]["registers"], "ptxas said nothing"
    assert compiled[name]["spills"] == []


@pytest.mark.parametrize("name", CASES)
def test_the_pool_is_not_copied(compiled: dict[str, dict[str, object]], name: str) -> None:
    """What is made: queries, padded and head by head, and sums of splits. The pools of decoding are far larger."""
    case = CASES[name]
    q = case.abstract()["q"]
    sums = 1024 * max(2 * case.heads, 8 * case.kv_heads) * case.size * 4
    assert compiled[name]["temporary"] < sums + 4 * q.size * q.dtype.itemsize + 2_000_000


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_chosen(compiled: dict[str, dict[str, object]], name: str) -> None:
    assert compiled[name]["unserved"] is None
