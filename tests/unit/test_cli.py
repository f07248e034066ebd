"""What the command says to those who ask, and to those who ask wrongly."""

from __future__ import annotations

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fabric_ray import __version__
from fabric_ray.cli.main import app


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize(
    "command",
    ["", "demo", "demo weights", "demo moe", "doctor", "plan", "top", "topo", "trace"],
)
def test_every_command_has_help(command: str, flag: str) -> None:
    result = run(*command.split(), flag)
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert "--help" in result.output


def test_the_version_is_the_packages() -> None:
    assert run("--version").output.strip() == __version__


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("demo weights --trainers 0", "trainers is 0; give at least 1"),
        ("demo weights --checkpoint /no/such/folder", "not a directory"),
        ("demo weights --address 127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1"),
        ("topo --rules bogus", "isn't a rule"),
    ],
)
def test_what_can_not_be_done_is_one_sentence(command: str, words: str) -> None:
    result = run(*command.split())
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_nic_that_is_not_there_is_a_failure() -> None:
    result = run("doctor", "--nics", "no_such_nic", "--budget", "1")
    assert result.exit_code == 1
    assert "no_such_nic" in result.output
