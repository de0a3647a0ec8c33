"""The commands of `jaxserve`. Nothing here imports jax: help and chat answer at once, a server listens at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxserve import __version__
from server import chat_cli, flags, plan_cli
from server.bench import command as bench_cli
from server.serving import serve


def run(words: Sequence[str]) -> int:
    """Runs a command line; returns the process's exit status."""
    parser = argparse.ArgumentParser(
        prog="jaxserve", description="Serves open language models through the OpenAI API.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    serve_parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model over HTTP; the demo model if none is named.",
        allow_abbrev=False,
    )
    flags.add_flags(serve_parser)
    chat_parser = commands.add_parser(
        "chat",
        help="talk to a running server from the terminal",
        description="Talks to a running server from the terminal.",
        allow_abbrev=False,
    )
    chat_cli.add_flags(chat_parser)
    bench_parser = commands.add_parser(
        "bench",
        help="measure a server, or the engine without one",
        description="Measures a server, or the engine without one.",
        allow_abbrev=False,
    )
    bench_cli.add_flags(bench_parser)
    plan_parser = commands.add_parser(
        "plan",
        help="what fits on a GPU that is not here, and how fast it could be",
        description="Compiles a model's programs for a GPU that is not here: what fits, and how fast it could be.",
        allow_abbrev=False,
    )
    plan_cli.add_flags(plan_parser)
    match words[:1]:
        case ["serve"]:
            return serve(*flags.read_flags(serve_parser, words[1:]))
        case ["chat"]:
            return chat_cli.chat(chat_parser.parse_args(words[1:]))
        case ["bench"]:
            return bench_cli.bench(bench_parser, words[1:])
        case ["plan"]:
            return plan_cli.plan(plan_parser, words[1:])
        case []:
            parser.print_help()
            return 0
        case _:
            parser.parse_args(words)
            return 2
