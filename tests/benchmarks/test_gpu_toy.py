"""The GPU benchmark from end to end at toy size, so that the first run on a GPU meets no typo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = 500
"""Seconds; it takes about a tenth of that on a machine that does nothing else."""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--toy", "--budget", str(BUDGET), "--folder", str(folder)]
    return subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=BUDGET + 30)


@pytest.mark.slow
@pytest.mark.timeout(BUDGET + 60)
def test_every_part_runs_and_is_not_run_again(tmp_path: Path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "results.json").read_text())
    states = {name: part["state"] for name, part in record["parts"].items()}
    if "torch" not in record["versions"]:
        assert states.pop("transformers") == "skipped"
        assert "torch is not installed here" in done.stdout
    assert set(states.values()) == {"done"} and len(states) == 5
    rows = {row["name"]: row["value"] for part in record["parts"].values() for row in part["rows"]}
    wanted = {"ready, cold", "ready, warm", "a token, batch 1", "host at work, batch 2", "idle between steps, batch 2"}
    wanted |= {"output of the crowd", "prompt of 32, alone", "faults of forward 32", "faults of sample 4"}
    wanted |= {"unrolled layers: a token, batch 2", "error, decoding beside two prompts"}
    assert wanted <= rows.keys()
    assert all(rows[name] > 0 for name in wanted if not name.startswith(("idle", "faults")))

    again = run(tmp_path)
    assert again.returncode == 0 and "..." not in again.stdout
    assert again.stdout.splitlines()[2:] == done.stdout[done.stdout.index("part   ") :].splitlines()


def test_a_part_that_does_not_exist_is_named(tmp_path: Path):
    wrong = run(tmp_path, "--again", "kernel")
    assert wrong.returncode == 2 and "no part 'kernel'; there are: ceilings, serving" in wrong.stderr
