"""`jaxserve bench` as a command: help without jax, unknown words."""

from __future__ import annotations

import pytest

from server.bench.command import COMMANDS
from server.cli import main
from tests.server.test_command import run

HELP = """
import sys
sys.modules["jax"] = None
from server.cli import main
for command in sys.argv[1:]:
    try:
        main(["bench", command, "--help"])
    except SystemExit as end:
        assert end.code == 0
"""


def test_help_needs_no_jax() -> None:
    done = run(HELP, *COMMANDS)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"usage: jaxserve bench {command}" in done.stdout for command in COMMANDS)


@pytest.mark.parametrize(("words", "told"), [((), "required: COMMAND"), (("swerve",), "invalid choice: 'swerve'")])
def test_an_unknown_command_is_told(capsys, words: tuple[str, ...], told: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", *words])
    assert end.value.code == 2
    assert told in capsys.readouterr().err


def test_help_lists_the_commands(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(told in out for told in COMMANDS.values())
