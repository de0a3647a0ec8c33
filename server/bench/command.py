"""The words after `jaxserve bench`: which of its commands is meant. Only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from server.flags import dashed

COMMANDS = {
    "serve": "measure a running server, any that speaks OpenAI's API",
    "throughput": "measure how much the engine answers, without a server",
    "latency": "measure how long one batch takes, without a server",
    "startup": "measure how long `jaxserve serve` takes to its first token",
}


class BenchError(Exception):
    """Something the user should read: it ends the command with status 1."""


class Command(Protocol):
    """What every module of a command has."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
        """Returns the exit status; leaves by `parser.error` where the words are wrong."""
        ...


def add_flags(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", dest="bench", metavar="COMMAND", required=True)
    for name, told in COMMANDS.items():
        commands.add_parser(name, help=told)


def bench(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Runs the command that the first word names; returns the process's exit status."""
    if not words or words[0] not in COMMANDS:
        parser.parse_args(list(words))
        return 2
    name = words[0]
    command = cast(Command, importlib.import_module(f"server.bench.{name}"))
    own = argparse.ArgumentParser(
        prog=f"{parser.prog} {name}", description=command.__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    command.add_flags(own)
    try:
        return command.run(own, [dashed(word) for word in words[1:]])
    except BenchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
