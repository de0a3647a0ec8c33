"""The flags of `jaxserve serve`, made from the fields of `EngineConfig` and `ServerConfig`.

A flag beats the YAML file, the file beats the default. Nothing is accepted that has no effect.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import Field, fields

from jaxserve.config import NOT_SERVED, EngineConfig, ServerConfig, read_yaml, split
from server.openai.dialect import check_parsers

KEY_VARIABLES = ("JAXSERVE_API_KEY", "VLLM_API_KEY")
type Owners = tuple[type[EngineConfig] | type[ServerConfig], ...]
BOTH: Owners = (EngineConfig, ServerConfig)
ENGINE: Owners = (EngineConfig,)
_SHORT_OF_VLLM = {
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-ep": "enable_expert_parallel",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-n": "nnodes",
    "-r": "node_rank",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
}


def add_flags(parser: argparse.ArgumentParser, owners: Owners = BOTH) -> None:
    """Adds every option of `owners`, the model as the first argument, and --config."""
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="what to serve; --model says the same")
    parser.add_argument("--config", metavar="FILE.yaml", help="options from a file, named like the flags")
    for owner in owners:
        group = parser.add_argument_group("engine" if owner is EngineConfig else "server")
        hints = typing.get_type_hints(owner)
        for option in fields(owner):
            _add(group, option, hints[option.name])


def read_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[EngineConfig, ServerConfig]:
    """Both configurations, from a parser that `add_flags` has filled, YAML and the environment.

    Exits with status 2 and a message on stderr when something is wrong.
    """
    options = _options(parser, argv, BOTH)
    try:
        options.setdefault("api_key", _keys_of_environment())
        engine, server = split(options)
        check_parsers(server)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    if any(not key.strip() for key in server.api_key):
        parser.error("an API key must not be empty")
    return engine, server


def read_engine_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> EngineConfig:
    """Like `read_flags`, for a parser with the engine's options only. The server's are of no concern in a file."""
    options = _options(parser, argv, ENGINE)
    try:
        return split(options)[0]
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def dashed(word: str) -> str:
    """`--max_model_len=8k` as `--max-model-len=8k`."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _options(parser: argparse.ArgumentParser, argv: Sequence[str], owners: Owners) -> dict[str, object]:
    """What the words and the file say, by the names of fields."""
    known, rest = parser.parse_known_args([dashed(word) for word in argv])
    _refuse_flags(parser, rest, owners)
    given: dict[str, object] = {name: value for name, value in vars(known).items() if value is not None}
    positional, file = given.pop("positional_model", None), given.pop("config", None)
    if positional is None and rest:  # some versions of argparse take an optional argument only before the flags
        positional = rest.pop(0)
    if rest:
        parser.error(f"unexpected argument {rest[0]!r}")
    if positional is not None and given.setdefault("model", positional) != positional:
        parser.error(f"two models are named: {positional} and {given['model']}")
    try:
        return (read_yaml(str(file)) if file is not None else {}) | given
    except ValueError as error:
        parser.error(str(error))


def _add(group: argparse._ArgumentGroup, option: Field[object], hint: object) -> None:  # pyright: ignore[reportPrivateUsage]
    names = [_flag(option), *([option.metadata["short"]] if "short" in option.metadata else [])]
    help_text = _help(option)
    if hint is bool:
        group.add_argument(
            *names, dest=option.name, action=argparse.BooleanOptionalAction, default=None, help=help_text
        )
    elif typing.get_origin(hint) is tuple:
        group.add_argument(*names, dest=option.name, action="extend", nargs="+", metavar="NAME", help=help_text)
    elif typing.get_origin(hint) is typing.Literal:
        group.add_argument(*names, dest=option.name, choices=typing.get_args(hint), help=help_text)
    else:
        kinds = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
        kind = float if float in kinds else _whole if int in kinds else str
        metavar = "N" if kind is not str else "TEXT"
        group.add_argument(*names, dest=option.name, type=kind, metavar=metavar, help=help_text)


def _flag(option: Field[object]) -> str:
    return str(option.metadata.get("flag") or "--" + option.name.replace("_", "-"))


def _help(option: Field[object]) -> str:
    text = str(option.metadata["help"]).replace("%", "%%")
    if option.default in (None, (), ""):
        return text
    shown = option.default
    if isinstance(shown, bool):
        shown = "on" if shown else "off"
    elif isinstance(shown, tuple):
        shown = " ".join(typing.cast(tuple[str, ...], shown))
    return f"{text} (default: {shown})"


def _whole(text: str) -> int | str:
    """An integer where it is one; what else may stand there (8k, auto), the configuration knows."""
    return int(text) if re.fullmatch(r"[+-]?\d{1,19}", text) else text


def _refuse_flags(parser: argparse.ArgumentParser, words: Iterable[str], owners: Owners) -> None:
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("-") and not re.fullmatch(r"-\d.*", name):
            parser.error(_unknown_flag(name, owners))


def _unknown_flag(flag: str, owners: Owners) -> str:
    name = _SHORT_OF_VLLM.get(flag, flag.lstrip("-").split(".")[0].replace("-", "_"))
    if re.fullmatch(r"-O\d?", flag):
        name = "compilation_config"
    if name in NOT_SERVED or name.removeprefix("no_") in NOT_SERVED:
        return f"{flag} is a flag of vLLM that jaxserve does not serve yet; remove it"
    known = ["config", *(_flag(option)[2:] for owner in owners for option in fields(owner))]
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
    hint = f"; did you mean --{near[0]}?" if near else "; `jaxserve serve --help` lists them all"
    return f"unknown flag {flag}{hint}"


def _keys_of_environment() -> tuple[str, ...]:
    found = (os.environ.get(name) for name in KEY_VARIABLES)
    return next(((key,) for key in found if key), ())
