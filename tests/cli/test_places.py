"""Files and folders that a command is given and cannot use: one line that names them, at once, and an exit code."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from autoflash.cli.application import FAILED, USAGE, main
from autoflash.db import sqlite_file
from autoflash.errors import DatabaseError


@pytest.mark.parametrize("command", ["show", "explain", "analyze", "render", "export"])
@pytest.mark.parametrize("content", [None, "garbage", "{}"])
def test_a_table_that_was_named_and_cannot_be_used_is_refused(
    command: str, content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What else there is would be shown as if it were the table's."""
    table = tmp_path / "table.json"
    if content is not None:
        table.write_text(content)

    assert main([command, "--table", str(table)]) == USAGE

    printed = capsys.readouterr()
    assert not printed.out
    assert f"Invalid value for '--table': {table}: " in printed.err


def test_to_the_doctor_a_damaged_table_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.json"
    table.write_text("garbage")

    assert main(["doctor", "--table", str(table), "--json"]) == FAILED

    assert any(str(table) in finding["text"] for finding in json.loads(capsys.readouterr().out))


@pytest.mark.parametrize("command", ["show", "show --trials", "export"])
def test_a_folder_is_no_database(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--db", str(tmp_path)]) == USAGE

    assert "it is a folder; name a file" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write in")
def test_a_place_where_no_file_can_be_made_is_not_waited_for() -> None:
    begun = time.monotonic()

    with pytest.raises(DatabaseError, match=r"^cannot write in /proc .*choose a writable place"):  # noqa: SIM117
        with sqlite_file.locked(Path("/proc/tuning.sqlite")):
            pass

    assert time.monotonic() - begun < 10.0


def test_a_lock_of_another_user_may_still_be_shared(tmp_path: Path) -> None:
    file = tmp_path / "tuning.sqlite"
    with sqlite_file.locked(file):
        pass

    shared = sqlite_file.beside(file, ".lock").stat().st_mode & 0o777

    assert shared == sqlite_file._SHARED_FILE_MODE


@pytest.mark.parametrize(
    "command", ["bench --quick --device cpu --out {}", "verify --all --device cpu --out {}/table.md"]
)
def test_results_that_could_not_be_written_are_not_computed(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    begun = time.monotonic()

    assert main([*command.format(file / "folder").split(), "--device", "cpu"]) == FAILED

    assert time.monotonic() - begun < 10.0
    assert str(file) in capsys.readouterr().err


@pytest.mark.parametrize("rows", [[{}], [1], {"pass": 1}])
def test_results_that_lack_something_are_not_drawn(
    rows: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.json"
    about = {"command": "autoflash bench", "device": "a GPU", "torch": "2", "triton": "3", "date": "2026-01-01"}
    results.write_text(json.dumps({**about, "rows": rows}))

    assert main(["plot", str(results), "--out", str(tmp_path / "plot.svg")]) == FAILED

    assert f"{results} is damaged or of another version" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--seqlen", "--seqlen-k", "--batch", "--heads", "--head-dim"])
def test_a_size_that_no_kernel_counts_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", option, "99999999999999"]) == USAGE

    assert f"Invalid value for '{option}'" in capsys.readouterr().err
