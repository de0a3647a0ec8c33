"""A process of its own for chat templates that requests bring.

A template is a program. There it may run for long or want much memory, and be killed for it, and nobody else notices.
One job after the other; the process starts with the first one, and ends with this one. Knows no request.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

MAX_SECONDS = 30.0
"""For one template."""
MAX_MEMORY = 1 << 30
"""Bytes that a template may take, over what the process needs anyway."""
MAX_TEXT = 1 << 25
"""Characters of a prompt."""
_ALARM = 2 * int(MAX_SECONDS)
"""Seconds after which the process ends itself, should nobody be there any more to end it."""
_SIZE = struct.Struct("<Q")
_ROOT = Path(__file__).parents[1]
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")
"""Variables that the process gets."""


class Job(Struct, kw_only=True, frozen=True):
    """One conversation to render. `variables`: what the template may use besides."""

    template: str
    messages: list[dict[str, object]]
    tools: list[dict[str, object]] | None = None
    documents: list[dict[str, object]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, object] = {}


class Rendered(Struct, frozen=True):
    """The text, or why there is none."""

    text: str = ""
    error: str | None = None


class TemplateProcess:
    """Renders templates nobody vouches for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="templates")

    async def render(self, job: Job) -> str:
        """The prompt.

        Raises:
            ValueError: the template fails, takes too long or needs too much memory.
        """
        rendered = await asyncio.get_running_loop().run_in_executor(self._thread, self._run, job)
        if rendered.error is not None:
            raise ValueError(f"chat template: {rendered.error}")
        return rendered.text

    def close(self) -> None:
        """Ends the process, also in the middle of a template."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()
        self._end()

    def _run(self, job: Job) -> Rendered:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(MAX_SECONDS, stop)
        timer.start()
        try:
            _write(process.stdin, job)
            rendered = _read(process.stdout, Rendered)
        except OSError:
            rendered = None
        finally:
            timer.cancel()
        if rendered is not None and not late.is_set():
            return rendered
        self._end()
        return Rendered(error=f"it takes more than {MAX_SECONDS:g} s" if late.is_set() else "it needs too much memory")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=_environment(),
                start_new_session=True,
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _environment() -> dict[str, str]:
    """What the process needs of this one's, which may hold keys."""
    kept = {name: value for name in _KEPT if (value := os.environ.get(name)) is not None}
    return {**kept, "PYTHONPATH": str(_ROOT), "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}


def main() -> None:
    """The process: renders until its input ends."""
    # What templates or libraries print goes elsewhere: the output carries records only.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template
    _limit_memory()
    while (job := _read(sys.stdin.buffer, Job)) is not None:
        signal.alarm(_ALARM)
        try:
            texts, _ = render(
                conversations=[job.messages],
                tools=job.tools,
                documents=job.documents,
                chat_template=job.template,
                add_generation_prompt=job.add_generation_prompt,
                continue_final_message=job.continue_final_message,
                **job.variables,
            )
            text = _in_utf8(texts[0])
            rendered = Rendered(text) if len(text) <= MAX_TEXT else Rendered(error="it makes too long a text")
        except MemoryError:
            rendered = Rendered(error="it needs too much memory")
        except Exception as error:  # a template is a program: it may fail in any way
            rendered = Rendered(error=_in_utf8(str(error)[:2000]) or type(error).__name__)
        signal.alarm(0)
        _write(out, rendered)


def _in_utf8(text: str) -> str:
    """`text` with a question mark for each half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode()


def _limit_memory() -> None:
    pages = Path("/proc/self/statm")
    if pages.exists():
        most = int(pages.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _write(stream: IO[bytes], record: Struct) -> None:
    data = msgspec.json.encode(record)
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _read[T: Struct](stream: IO[bytes], record: type[T]) -> T | None:
    """The next record, or None at the end of the stream."""
    head = stream.read(_SIZE.size)
    if len(head) < _SIZE.size:
        return None
    size: int = _SIZE.unpack(head)[0]
    data = stream.read(size)
    return msgspec.json.decode(data, type=record) if len(data) == size else None


if __name__ == "__main__":
    main()
