"""Kernels that are verified before they are timed: what is asked of them, once, and what a wrong one comes to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli import bench_check
from autoflash.cli.application import main
from autoflash.cli.bench_check import Check
from autoflash.evaluate.accuracy import Errors
from autoflash.problem import Problem
from autoflash.trial import Level, Verification
from autoflash.variant import Family
from tests.factories import make_variant

SMALL = ["bench", "--verify", "--head-dim", "16", "--causal", "--peers", "math,flex"]
VARIANT = make_variant(Family.TORCH_TILED)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Problem]:
    """Which problems the gate is asked for; a backward is wrong."""
    problems: list[Problem] = []

    def verify(executable: object, problem: Problem, level: Level, **options: object) -> Verification:
        problems.append(problem)
        assert level is Level.FULL
        passed = problem.op.value == "forward"
        return Verification(level=level, passed=passed, worst_ratio=0.5 if passed else 7.0, detail="as said", checks=9)

    monkeypatch.setattr(bench_check, "verify", verify)
    return problems


def test_a_right_kernel_has_its_errors_beside_those_of_torch(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    report = run_json(*SMALL, "--seqlen", "64", "--pass", "forward", "--out", str(tmp_path))

    (row,) = report["rows"]
    assert row["gate"]["passed"] is True
    assert row["gate"]["checks"] > 10
    assert 0.0 < row["gate"]["worst_ratio"] <= 1.0
    assert list(row["gate"]["error_to"]) == ["math"]
    assert 0.0 < row["gate"]["error_to"]["math"] < 10.0
    (file,) = tmp_path.iterdir()
    assert json.loads(file.read_text()) == report


def test_a_wrong_kernel_is_said_and_ends_in_1(asked: list[Problem], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--seqlen", "64", "--device", "cpu"]) == 1

    text = capsys.readouterr().out
    assert "gate: the generated kernels of 1 of 2 rows passed" in text
    assert "forward: largest error against float64 to that of math, 1 rows: geometric mean" in text
    assert "WRONG: torch_tiled" in text
    assert "heads_per_step=0: as said" in text


def test_a_kernel_is_verified_once_for_lengths_with_the_same_cases(
    asked: list[Problem], run_json: Callable[..., Any]
) -> None:
    report = run_json(*SMALL, "--seqlen", "1024", "--seqlen", "2048", "--seqlen", "64", "--pass", "forward")

    assert [row["gate"]["passed"] for row in report["rows"]] == [True] * 3
    assert [problem.seqlen_q for problem in asked] == [1024, 64]


def test_a_kernel_that_raises_is_wrong(monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any]) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(bench_check, "verify", fail)

    (row,) = run_json(*SMALL, "--seqlen", "64", "--pass", "forward", code=1)["rows"]

    assert row["gate"] == {
        "passed": False,
        "checks": 0,
        "worst_ratio": None,
        "detail": "RuntimeError: an illegal memory access",
        "error_to": {"math": None},
    }


def test_the_largest_ratio_of_errors_counts() -> None:
    errors = (
        Errors(output="dq", kernel=2e-3, torch={"cudnn": 1e-3, "plain": 1e-3}),
        Errors(output="dk", kernel=1e-3, torch={"cudnn": 4e-3}),
        Errors(output="dv", kernel=1.0, torch={"flash": 1e-3}),
    )
    check = Check(variant=VARIANT, errors=errors)

    assert check.ratio_to("cudnn") == pytest.approx(2.0)
    assert check.ratio_to("efficient") is None
    assert not check.passed


@pytest.mark.parametrize("other", ["--step", "--systems", "--blocks", "--exhaustive", "--overhead"])
def test_it_is_for_the_grid_alone(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--verify", other, "--device", "cpu"]) == 2

    assert "--verify is for the grid" in capsys.readouterr().err
