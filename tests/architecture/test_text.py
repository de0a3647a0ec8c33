"""What may stand in no file of the repository: a machine's paths, a package registry's address, foreign folders."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Written in pieces, so that this file does not hold what it forbids.
FORBIDDEN = {
    "a path of one machine": r"/(?:wo[r]k|far[m])/|/ro[o]t/|/ho[m]e/[a-z]|/tm[p]/bash_jobs",
    "a package registry's address": r"pypi\.o[r]g|python[h]osted\.o[r]g|registry\.npm[j]s\.o[r]g|deb\.deb[i]an\.o[r]g",
    "a folder outside the repository": r"\.\./sha[r]ed\b",
}


def _texts() -> list[tuple[Path, str]]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    contents = [(file, file.read_bytes()) for file in files if file.is_file()]
    return [(file, data.decode(errors="replace")) for file, data in contents if b"\0" not in data[:8192]]


def test_no_file_names_a_machine_or_a_registry():
    found = [
        f"{file.relative_to(ROOT)}:{text[: match.start()].count(chr(10)) + 1}: {what}: {match[0]}"
        for file, text in _texts()
        for what, pattern in FORBIDDEN.items()
        for match in re.finditer(pattern, text)
    ]
    assert found == []
