"""How the server looks in a terminal: log lines, and below them how far loading is."""

from __future__ import annotations

import logging
import threading
from typing import TextIO


class LoadingLine:
    """What is being done, from any thread: a line rewritten in place, or one line a stage where that cannot be."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        self._shown = ""

    def show(self, stage: str, share: float) -> None:
        """`share` of the stage is done, 0..1."""
        with self._lock:
            if self._live:
                text = f"{stage} ... {int(share * 100)} %" if share else f"{stage} ..."
                if text != self._shown:
                    self._write(text)
            elif stage not in self._seen:
                self._seen.add(stage)
                print(f"{stage} ...", file=self._out, flush=True)

    def clear(self) -> None:
        """Makes room for something else."""
        with self._lock:
            if self._shown:
                self._write("")

    def _write(self, text: str) -> None:
        self._shown = text
        self._out.write(f"\r{text}\x1b[K")
        self._out.flush()


class LogAbove(logging.StreamHandler[TextIO]):
    """Log lines that do not run into the loading line."""

    def __init__(self, out: TextIO, line: LoadingLine) -> None:
        super().__init__(out)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.clear()
        super().emit(record)
