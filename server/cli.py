"""Where the `jaxserve` command begins: the process is made what it should be before anything large is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from server import huge_pages


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the process's exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words[:1] in (["serve"], ["bench"]):
        huge_pages.start_with()
    return importlib.import_module("server.commands").run(words)
