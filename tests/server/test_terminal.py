"""The loading line, in a terminal and in a file."""

from __future__ import annotations

import io
import logging

from server.terminal import LoadingLine, LogAbove


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_each_stage_once() -> None:
    out = io.StringIO()
    line = LoadingLine(out)
    for stage, share in (("reading", 0.0), ("compiling", 0.1), ("reading", 0.5), ("compiling", 0.9)):
        line.show(stage, share)
    line.clear()
    assert out.getvalue() == "reading ...\ncompiling ...\n"


def test_a_terminal_gets_one_line_and_logs_above_it() -> None:
    out = Terminal()
    line = LoadingLine(out)
    line.show("reading", 0.0)
    line.show("reading", 0.501)
    line.show("reading", 0.502)
    LogAbove(out, line).emit(logging.LogRecord("x", logging.INFO, "", 0, "hello", None, None))
    assert out.getvalue() == "\rreading ...\x1b[K\rreading ... 50 %\x1b[K\r\x1b[Khello\n"
