"""What the process of every engine does: start, answer one token, then time each workload that `compare.py` sends.

    python -m benchmarks.peers.with_vllm < lines

The first line of standard input is a `Setting`, each line after it a workload: requests of a prompt and a number of
tokens to answer, all asked at once. Standard output has a line for each. An engine's own talk goes to standard error.
Runs in the environment of the engine that it drives: standard library only, Python 3.11.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

TICK = 1 / os.sysconf("SC_CLK_TCK")
"""Seconds."""
POOL_GIB = 3
"""Of KV, in engines that are told a size: more than any workload needs."""
FIRST = ([7] * 32, 1)
"""The request that ends a start."""

Request = tuple[list[int], int]
"""Prompt tokens, and how many to answer, whatever they are."""


@dataclass(frozen=True)
class Setting:
    """What an engine is started with."""

    model: str
    """Directory or file, in the format and the precision of this engine."""
    precision: str
    """bf16, f32 or int8: of weights and products."""
    variant: str
    """Of engines that can be driven in several ways; empty elsewhere."""
    threads: int
    sequences: int
    """That may be computed together."""
    length: int
    """Of the longest sequence."""
    caching: bool
    """Whether prompts that begin alike share their KV."""
    compiled: str
    """Directory for what the engine compiles and keeps."""


@dataclass(frozen=True)
class Answered:
    """What became of one workload."""

    answers: list[list[int]]
    """Tokens of each."""
    computed: int | None = None
    """Prompt tokens that were computed; None where the engine does not tell."""


Answer = Callable[[Sequence[Request]], Answered]
"""Answers all requests greedily, each with exactly as many tokens as it says."""


def drive(start: Callable[[Setting], Answer]) -> None:
    """The life of the process."""
    told = _take_standard_output()
    answer = start(Setting(**json.loads(sys.stdin.readline())))
    _answer(answer, [FIRST])
    # The clock is the machine's, so that whoever started this process can subtract.
    _tell(told, {"first_token": time.monotonic()})
    for line in sys.stdin:
        requests = [(list(prompt), int(count)) for prompt, count in json.loads(line)]
        begin, cpu = time.monotonic(), cpu_seconds(os.getpid())
        answered = _answer(answer, requests)
        seconds, cpu = time.monotonic() - begin, cpu_seconds(os.getpid()) - cpu
        _tell(told, {"seconds": seconds, "cpu": cpu, "answers": answered.answers, "computed": answered.computed})


def cpu_seconds(pid: int) -> float:
    """Of a process and all that descend from it, the dead ones that were waited for included."""
    stats = dict(_stats())
    return sum(stats[one][1] for one in family(pid, {child: parent for child, (parent, _) in stats.items()}))


def descendants(pid: int) -> set[int]:
    """A process and all that descend from it."""
    return family(pid, {child: parent for child, (parent, _) in _stats()})


def family(pid: int, parents: Mapping[int, int]) -> set[int]:
    """`pid` and all whose parents, or theirs, it is."""
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def free_port() -> int:
    """Of this machine, at this moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _stats() -> Iterable[tuple[int, tuple[int, float]]]:
    """Of each process: its number, its parent's, seconds of user and system time."""
    for found in Path("/proc").iterdir():
        if not found.name.isdigit():
            continue
        try:
            words = (found / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        yield int(found.name), (int(words[1]), sum(map(int, words[11:15])) * TICK)


def _answer(answer: Answer, requests: Sequence[Request]) -> Answered:
    answered = answer(requests)
    wanted = [count for _, count in requests]
    if (made := [len(tokens) for tokens in answered.answers]) != wanted:
        raise RuntimeError(f"answers of {made} tokens where {wanted} were asked for")
    return answered


def _take_standard_output() -> TextIO:
    """For our lines alone; what others print goes to standard error from now on."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return told


def _tell(told: TextIO, record: dict[str, object]) -> None:
    print(json.dumps(record), file=told, flush=True)
