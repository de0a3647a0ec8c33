"""`jaxserve bench` as a command: help without jax, unknown words."""

from __future__ import annotations

import pytest

from server.bench.command import COMMANDS
from server.cli import main
from tests.server.test_command import WITHOUT_JAX, run


def test_help_needs_no_jax() -> None:
    for command in COMMANDS:
        done = run(WITHOUT_JAX, "bench", command, "--help")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"usage: jaxserve bench {command}")


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
    assert all(name in capsys.readouterr().out for name in ("serve",))
