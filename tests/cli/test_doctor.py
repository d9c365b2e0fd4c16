from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli import doctor
from autoflash.cli.application import main
from tests.cli.conftest import Filled


def _by_subject(findings: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in findings}


def test_a_healthy_machine_is_described(filled: Filled, run_json: Callable[..., Any]) -> None:
    found = _by_subject(run_json("doctor"))

    assert found["torch"]["state"] == "ok"
    assert found["triton"]["state"] == "ok"
    assert found["torch_tiled kernels"] == {
        "subject": "torch_tiled kernels",
        "state": "ok",
        "text": "forward and backward",
    }
    assert "cross-compiled" in found["triton kernels"]["text"]
    assert "3 trials, 2 decisions" in found["database"]["text"]
    assert filled.foreign.environment.device_name in found["other devices"]["text"]


def test_a_decision_whose_kernel_text_changed_is_counted_as_stale(filled: Filled, run_json: Callable[..., Any]) -> None:
    found = _by_subject(run_json("doctor"))

    assert "has changed" in found["stale"]["text"]


def test_case_a22_a_missing_c_compiler_is_named(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    found = _by_subject(run_json("doctor"))

    assert "install gcc" in found["C compiler"]["text"]


def test_case_a23_a_cache_that_cannot_be_written_is_a_failure(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", "/proc/autoflash")

    found = _by_subject(run_json("doctor", code=1))

    assert found["cache"]["state"] == "failure"
    assert "/proc/autoflash" in found["cache"]["text"]
    assert "AUTOFLASH_CACHE_DIR" in found["cache"]["text"]


def test_a_database_that_cannot_be_read_is_a_failure(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    garbage = tmp_path / "garbage.sqlite"
    garbage.write_bytes(b"no database" * 500)

    found = _by_subject(run_json("doctor", "--db", str(garbage), code=1))

    assert str(garbage) in found["database"]["text"]


def test_a_missing_database_is_no_failure_and_is_not_made(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    database = tmp_path / "none.sqlite"

    found = _by_subject(run_json("doctor", "--db", str(database)))

    assert found["database"]["state"] == "note"
    assert not database.exists()


@pytest.mark.parametrize(("release", "state"), [("3.6", "ok"), ("3.9", "ok"), ("3.10", "warning"), ("3.5", "warning")])
def test_releases_outside_what_was_tested_are_warned_of(release: str, state: str) -> None:
    finding = doctor._release("triton", release, doctor.TESTED_TRITON)

    assert finding.state == state


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "cuda:99"]) == 1

    assert "cuda:99" in capsys.readouterr().out
