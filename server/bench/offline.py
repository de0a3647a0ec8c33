"""What the benches without a server share: the engine's flags beside their own, and an `LLM` made from them."""

from __future__ import annotations

import argparse
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields

import jaxserve
from jaxserve.config import EngineConfig
from server import flags
from server.bench.command import BenchError

ENGINE_HELP = "besides: every engine flag of `jaxserve serve`, the model as an argument, and --config"


def read_words(
    parser: argparse.ArgumentParser, words: Sequence[str], owners: flags.Owners = flags.ENGINE
) -> tuple[argparse.Namespace, argparse.ArgumentParser, list[str]]:
    """The bench's own flags; a parser for what `owners` take, and the words that are left for it."""
    parser.epilog = ENGINE_HELP
    own, rest = parser.parse_known_args(words)
    others = argparse.ArgumentParser(prog=parser.prog, usage=parser.format_usage()[7:], allow_abbrev=False)
    flags.add_flags(others, owners)
    return own, others, rest


@contextmanager
def engine(config: EngineConfig) -> Generator[jaxserve.LLM]:
    """An engine that is ready. jax is imported here, by using its name for the first time.

    Raises:
        BenchError: it cannot be started.
    """
    try:
        llm = jaxserve.LLM(**{option.name: getattr(config, option.name) for option in fields(config)})
    except (ValueError, OSError) as error:
        raise BenchError(str(error)) from None
    with llm:
        yield llm
