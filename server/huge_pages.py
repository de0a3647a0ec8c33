"""Large pages for the engine on a CPU: glibc asks Linux for them only if it is told so when a process starts."""

from __future__ import annotations

import os
import sys

SETTING = "/sys/kernel/mm/transparent_hugepage/enabled"
TUNABLE = "glibc.malloc.hugetlb=1"


def start_with() -> None:
    """Starts this process anew, under its own number, with glibc asking for large pages; returns where that is no use.

    KV and weights are read all over in every step, and a page of 4 KiB costs as much to find as what is read from it.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or "glibc.malloc.hugetlb" in tunables or not _only_on_request():
        return
    os.environ["GLIBC_TUNABLES"] = f"{tunables}:{TUNABLE}" if tunables else TUNABLE
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _only_on_request() -> bool:
    try:
        with open(SETTING, encoding="ascii") as setting:
            return "[madvise]" in setting.read()
    except OSError:
        return False
