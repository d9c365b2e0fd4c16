from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli import bench_blocks, bench_grid
from autoflash.cli.application import main
from autoflash.problem import Mask, Pass
from tests.factories import make_device

SMALL = ["bench", "--blocks", "--seqlen", "512", "--head-dim", "16"]


def report_of(*, times_us: tuple[float | None, ...] = (1000.0, 520.0, 280.0, 150.0, 90.0)) -> dict[str, Any]:
    """A results file of one problem in both passes."""

    def timed(median_us: float | None) -> dict[str, Any]:
        return {"median_us": median_us, "tflops": None, "variant": {}}

    points = [
        {"visible": share, **timed(time_us)} for share, time_us in zip(bench_blocks.SHARES, times_us, strict=True)
    ]
    rows = [
        {
            "pass": op.value,
            "mask": Mask.FULL.value,
            "features": "softcap,block_mask",
            "head_dim": 128,
            "seqlen": 8192,
            "without": timed(950.0),
            "points": points,
        }
        for op in Pass
    ]
    about = {"device": "A GPU", "torch": "2.13", "triton": "3.6", "date": "2026-01-01"}
    return {**about, "command": "autoflash bench --blocks", "rows": rows}


def test_times_are_by_the_share_that_is_shown(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    report = run_json(*SMALL, "--pass", "forward", "--out", str(tmp_path))

    (row,) = report["rows"]
    assert (row["pass"], row["features"], row["block_size"]) == ("forward", "block_mask", 128)
    # Of four blocks of keys, at least one.
    assert [point["visible"] for point in row["points"]] == [1.0, 0.5, 0.25, 0.25, 0.25]
    assert all(point["median_us"] > 0.0 for point in [row["without"], *row["points"]])
    (written,) = tmp_path.glob("blocks-*.json")
    assert json.loads(written.read_text()) == report


def test_a_table_has_a_line_for_each_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--pass", "backward", "--softcap", "20", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert "backward, full, D = 16, S = 512" in text
    lines = [line.split("  ")[0] for line in text.splitlines()]
    assert [line for line in lines if line.endswith("%") or line == "no block mask"] == [
        "no block mask",
        "100.0 %",
        "50.0 %",
        *["25.0 %"] * 3,
    ]


@pytest.mark.parametrize(
    "option", [["--systems"], ["--exhaustive"], ["--overhead"], ["--flex"], ["--peers", "flex"], ["--readme", __file__]]
)
def test_it_is_a_run_of_its_own(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *option, "--device", "cpu"]) == 2

    assert "--blocks" in capsys.readouterr().err


def test_packed_sequences_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--varlen", "--device", "cpu"]) == 2

    assert "packed sequences have no block mask" in capsys.readouterr().err


@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
def test_sequences_have_blocks_enough_for_the_least_share(arch: str) -> None:
    device = make_device(arch)
    usual = bench_grid.default_grid(device, quick=False)

    grid = bench_blocks.default_grid(usual, device, quick=False)

    asked = dataclasses.replace(grid, asked=dataclasses.replace(grid.asked, block_size=128))
    assert {problem.op for problem in asked.problems()} == set(Pass)
    assert all(problem.seqlen_k * bench_blocks.SHARES[-1] > 0.9 * 128 for problem in asked.problems())


def test_the_plot_has_a_panel_for_each_problem(tmp_path: Path) -> None:
    results, files = tmp_path / "blocks.json", [tmp_path / name for name in ("first.svg", "second.svg")]
    results.write_text(json.dumps(report_of()))

    codes = [main(["plot", str(results), "--out", str(file)]) for file in files]

    assert codes == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text()
    assert "backward, full+softcap, D = 128, S = 8192" in text
    assert all(label in text for label in ("with a block mask", "in proportion", "without one"))


def test_a_kernel_without_a_time_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "blocks.json"
    results.write_text(json.dumps(report_of(times_us=(None,) * 5)))

    assert main(["plot", str(results), "--out", str(tmp_path / "blocks.svg")]) == 0

    assert "in proportion" not in (tmp_path / "blocks.svg").read_text()
