"""A process of an engine, held still while it is another one's turn."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from benchmarks.peers.driver import POOL_GIB, Request, Setting, descendants

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 20.0


class EngineError(Exception):
    """An engine does not start or does not answer; the message names the file with its last words."""


@dataclass(frozen=True)
class Measured:
    """One workload, answered once."""

    numbers: Mapping[str, float]
    """Seconds, CPU seconds, tokens answered, and prompt tokens computed where the engine tells."""
    answers: list[list[int]]


def cores(threads: int) -> list[int]:
    """Numbers of those that so many threads run on."""
    return sorted(os.sched_getaffinity(0))[:threads]


def environment(threads: int, compiled: Path) -> dict[str, str]:
    """What engines are told by variables: threads, where to keep what they compile, to ask no hub."""
    told = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CACHE_ROOT": str(compiled),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": str(POOL_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores(threads))),  # by itself it leaves a core to its scheduler
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**os.environ, **told}


class Held:
    """Any process with all its descendants: stopped, except inside of `turn`; killed at the end."""

    def __init__(self, command: Sequence[str | Path], threads: int, compiled: Path, log: Path) -> None:
        """Starts it on as many cores as it may have threads; it runs until the first turn has ended."""
        self.log = log
        self.began = time.monotonic()
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment(threads, compiled),
            )
        os.sched_setaffinity(self.process.pid, cores(threads))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def ended(self) -> EngineError:
        return EngineError(f"it ended with status {self.process.wait()}; its last words are in {self.log}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Asked first, so that it can end its own processes."""
        family = descendants(self.process.pid)
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)


class Driver(Held):
    """The process of a driver."""

    def __init__(self, python: Path, kind: str, setting: Setting, log: Path) -> None:
        super().__init__([python, "-m", f"benchmarks.peers.with_{kind}"], setting.threads, Path(setting.compiled), log)
        self._say(asdict(setting))

    def start(self) -> float:
        """Seconds from the new process to its first token.

        Raises:
            EngineError: it does not come so far.
        """
        return float(str(self._hear()["first_token"])) - self.began

    def measure(self, requests: Sequence[Request]) -> Measured:
        """Its answers to all requests, asked at once.

        Raises:
            EngineError: it fails.
        """
        with self.turn():
            self._say(requests)
            told = dict(self._hear())
        answers = cast(list[list[int]], told.pop("answers"))
        numbers = {name: float(str(value)) for name, value in told.items() if value is not None}
        return Measured({**numbers, "tokens": float(sum(map(len, answers)))}, answers)

    def _say(self, words: object) -> None:
        assert self.process.stdin is not None
        try:
            print(json.dumps(words), file=self.process.stdin, flush=True)
        except BrokenPipeError:
            raise self.ended() from None

    def _hear(self) -> Mapping[str, object]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self.ended()
        return json.loads(line)
