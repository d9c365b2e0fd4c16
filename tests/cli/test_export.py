from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.db.repository import Repository
from tests.cli.conftest import Filled


def test_export_to_standard_output_is_the_file(
    filled: Filled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"

    assert main(["export"]) == 0
    printed = capsys.readouterr().out
    assert main(["export", "--out", str(out)]) == 0

    assert printed.rstrip("\n") == out.read_text().rstrip("\n")


def test_export_of_an_import_has_the_same_bytes(filled: Filled, tmp_path: Path) -> None:
    first, second, other = tmp_path / "a.json", tmp_path / "b.json", str(tmp_path / "other.sqlite")

    assert main(["export", "--out", str(first)]) == 0
    assert main(["import", str(first), "--db", other]) == 0
    assert main(["import", str(first), "--db", other]) == 0
    assert main(["export", "--out", str(second), "--db", other]) == 0

    assert first.read_bytes() == second.read_bytes()


def test_export_again_replaces_its_own_file(filled: Filled, tmp_path: Path) -> None:
    out = tmp_path / "table.json"

    assert main(["export", "--out", str(out)]) == 0
    assert main(["export", "--out", str(out)]) == 0


def test_only_this_device_is_exported_on_demand(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--here", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert filled.here.device_name in text
    assert filled.foreign.environment.device_name not in text


def test_case_a52_garbage_is_not_overwritten(
    filled: Filled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.json"
    out.write_text("my notes")

    assert main(["export", "--out", str(out)]) == 1

    assert out.read_text() == "my notes"
    assert "--force" in capsys.readouterr().err
    assert main(["export", "--out", str(out), "--force"]) == 0
    assert out.read_text() != "my notes"


def test_case_a52_results_of_another_device_are_not_overwritten(
    filled: Filled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.json"
    assert main(["export", "--out", str(out)]) == 0
    before = out.read_bytes()

    assert main(["export", "--here", "--device", "cpu", "--out", str(out)]) == 1

    assert out.read_bytes() == before
    complaint = capsys.readouterr().err
    assert filled.foreign.environment.device_name in complaint
    assert "import it first" in complaint


def test_case_a52_a_read_only_file_is_not_overwritten(filled: Filled, tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    assert main(["export", "--out", str(out)]) == 0
    out.chmod(0o444)

    assert main(["export", "--out", str(out)]) == 1


def test_case_a52_a_folder_is_refused(filled: Filled, tmp_path: Path) -> None:
    assert main(["export", "--out", str(tmp_path)]) == 1
    assert main(["export", "--out", str(tmp_path), "--force"]) == 1
    assert main(["export", "--out", str(tmp_path / "none" / "f.json")]) == 1


def test_case_a52_a_full_disk_leaves_the_old_file(
    filled: Filled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "f.json"
    out.write_text("old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("autoflash.deploy.export.os.fsync", full)

    assert main(["export", "--out", str(out), "--force"]) == 1
    assert out.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".f.json")] == []
    assert "No space left on device" in capsys.readouterr().err


def test_exporting_nothing_is_an_error_that_says_how_to_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--db", str(tmp_path / "none.sqlite")]) == 1

    assert "autoflash tune" in capsys.readouterr().err


def test_case_a34_rows_of_another_device_are_imported_and_said_to_be_unused(
    filled: Filled, tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    out, other = tmp_path / "table.json", str(tmp_path / "other.sqlite")
    assert main(["export", "--out", str(out)]) == 0

    said = run_json("import", str(out), "--db", other)

    assert (said["decisions"], said["for_other_devices"]) == (2, 1)
    assert said["devices"] == [filled.foreign.environment.device_name]
    with Repository.open(other, read_only=True) as repository:
        assert len(repository.decisions()) == 2


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-40], lambda text: text.replace("900.0", "1.0"), lambda text: ""]
)
def test_case_a34_a_damaged_table_is_refused_whole(
    damage: Callable[[str], str], filled: Filled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, other = tmp_path / "table.json", tmp_path / "other.sqlite"
    assert main(["export", "--out", str(out)]) == 0
    out.write_text(damage(out.read_text()))

    assert main(["import", str(out), "--db", str(other)]) == 1

    assert capsys.readouterr().err.startswith("Error: ")
    assert not other.exists()


def test_importing_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    assert main(["import", str(tmp_path / "none.json")]) == 2
