"""A process that starts itself anew once, with one more setting and everything else as it was."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from server import huge_pages

SCRIPT = """
import os, pathlib, sys
from server import huge_pages
huge_pages.SETTING = pathlib.Path(sys.argv[1])
huge_pages.start_with()
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], sys.flags.utf8_mode)
"""


def run(setting: object, tunables: str | None) -> tuple[int, list[str]]:
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    env |= {} if tunables is None else {"GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-X", "utf8", "-c", SCRIPT, str(setting), "a b", "c"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        out = process.communicate(timeout=60)[0]
        return process.pid, out.strip().split(" ", 2)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
@pytest.mark.parametrize(
    ("mode", "tunables", "want"),
    [
        ("always [madvise] never", None, huge_pages.TUNABLE),
        ("always [madvise] never", "a=1", f"a=1:{huge_pages.TUNABLE}"),
        ("always [madvise] never", "glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
        ("[always] madvise never", None, "None"),
        ("always madvise [never]", None, "None"),
        (None, None, "None"),
    ],
)
def test_starts_anew_where_it_helps(tmp_path, mode: str | None, tunables: str | None, want: str) -> None:
    setting = tmp_path / "enabled"
    if mode is not None:
        setting.write_text(mode)
    pid, (found, tuned, rest) = run(setting, tunables)
    assert (int(found), tuned) == (pid, want)
    assert rest == "['a b', 'c'] 1"
