from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from autoflash.cli import application
from autoflash.cli.application import COMMANDS, main
from autoflash.errors import DatabaseError, InvalidProblemError, NoKernelError, TableError

ROOT = Path(__file__).parents[2]


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command("show")
    def command() -> None:
        raise error

    monkeypatch.setattr(application.program, "get_command", lambda context, name: command)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TableError("damaged"), 1),
        (NoKernelError("none"), 1),
        (DatabaseError("cannot open /x"), 2),
        (InvalidProblemError("heads"), 2),
        (click.UsageError("what?"), 2),
        (click.ClickException("failed"), 1),
        (click.exceptions.Exit(1), 1),
        (KeyboardInterrupt(), 130),
    ],
    ids=repr,
)
def test_errors_become_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _fail_with(error, monkeypatch)

    assert main(["show"]) == code


def test_an_error_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _fail_with(DatabaseError("cannot open /x: it is a folder"), monkeypatch)

    main(["show"])

    output = capsys.readouterr()
    assert output.err == "Error: cannot open /x: it is a folder\n"
    assert output.out == ""


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tuen"]) == 2
    assert "No such command" in capsys.readouterr().err


def test_help_lists_every_command_in_the_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    text = capsys.readouterr().out
    positions = [text.index(f"\n  {name} ") for name in COMMANDS]
    assert positions == sorted(positions)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m autoflash.cli --help | true; echo ${{PIPESTATUS[0]}}"

    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)

    assert done.stdout.strip() == "0"
    assert done.stderr == ""
