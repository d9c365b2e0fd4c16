from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.db.repository import Repository
from autoflash.problem import Feature
from tests.cli.conftest import Filled
from tests.factories import make_cell, make_decision


def test_decisions_of_all_devices_are_listed(filled: Filled, run_json: Callable[..., Any]) -> None:
    listed = run_json("show")

    assert [row["environment"]["device_name"] for row in listed] == sorted(
        [filled.here.device_name, filled.foreign.environment.device_name]
    )
    mine = next(row for row in listed if row["environment"]["device_name"] == filled.here.device_name)
    assert mine["cell"] == filled.cell.to_dict()
    assert mine["choices"][0]["variant"] == filled.winner.to_dict()
    assert mine["vendor"]["median_us"] == 1800.0


def test_a_decision_says_its_speed_beside_the_vendors(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--device", "cpu"]) == 0

    line = next(line for line in capsys.readouterr().out.splitlines() if filled.here.device_name in line)
    assert str(filled.cell) in line
    assert "900.0" in line
    assert "2.00x" in line


def test_trials_are_counted_by_status(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--trials", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert "3 trials: correct 2, compile 1" in text
    assert "PassManager failed" in text


def test_trials_are_filtered_by_status(filled: Filled, run_json: Callable[..., Any]) -> None:
    listed = run_json("show", "--status", "compile")

    assert [(row["status"], row["detail"], row["median_us"]) for row in listed] == [
        ("compile", "PassManager failed", None)
    ]


@pytest.mark.parametrize(
    ("option", "count"),
    [
        (["--pass", "forward"], 2),
        (["--pass", "backward"], 0),
        (["--dtype", "fp32"], 2),
        (["--dtype", "bf16"], 0),
        (["--head-dim", "64"], 2),
        (["--head-dim", "128"], 0),
        (["--causal"], 2),
        (["--full"], 0),
        (["--limit", "1"], 1),
    ],
)
def test_decisions_are_filtered(
    option: list[str], count: int, filled: Filled, run_json: Callable[..., list[object]]
) -> None:
    assert len(run_json("show", *option)) == count


def test_decisions_are_filtered_by_feature(filled: Filled, run_json: Callable[..., Any]) -> None:
    with Repository.open() as repository:
        for features in ((Feature.SOFTCAP,), (Feature.SOFTCAP, Feature.DROPOUT)):
            repository.save_decision(make_decision(cell=make_cell(features=features)))

    def features_of(*options: str) -> list[str]:
        return [row["cell"].get("features", "") for row in run_json("show", *options)]

    assert features_of("--feature", "softcap") == ["softcap", "softcap,dropout"]
    assert features_of("--feature", "softcap", "--feature", "dropout") == ["softcap,dropout"]
    assert features_of("--feature", "window") == []
    assert len(features_of()) == 4


def test_without_a_database_nothing_is_listed_and_nothing_made(
    tmp_path: Path, run_json: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    database = tmp_path / "none.sqlite"

    assert run_json("show", "--db", str(database)) == []
    assert main(["show", "--db", str(database)]) == 0

    assert "autoflash tune" in capsys.readouterr().out
    assert not database.exists()


def test_a_file_that_is_no_database_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    database = tmp_path / "garbage.sqlite"
    database.write_bytes(b"this is not a database" * 100)

    assert main(["show", "--db", str(database)]) == 2

    assert str(database) in capsys.readouterr().err
