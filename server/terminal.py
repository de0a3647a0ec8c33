"""How loading looks in the terminal: one line a stage, rewritten in place where the terminal can."""

from __future__ import annotations

import threading
import time
from typing import TextIO


class LoadingLines:
    """Stages and their progress, from any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._lock = threading.Lock()
        self._stage = ""
        self._began = 0.0
        self._shown = -1

    def show(self, stage: str, share: float) -> None:
        """`share` of the stage is done, 0..1."""
        percent = int(share * 100)
        with self._lock:
            if stage != self._stage:
                self._close()
                self._stage, self._began, self._shown = stage, time.monotonic(), -1
                if not self._live:
                    print(f"{stage} ...", file=self._out, flush=True)
            if self._live and percent != self._shown:
                self._shown = percent
                self._out.write(f"\r{self._text()} {percent:3d} %\x1b[K")
                self._out.flush()

    def end(self) -> None:
        with self._lock:
            self._close()
            self._stage = ""

    def _close(self) -> None:
        if self._stage and self._live:
            self._out.write(f"\r{self._text()} {time.monotonic() - self._began:.1f} s\x1b[K\n")
            self._out.flush()

    def _text(self) -> str:
        return f"{self._stage} ..."
