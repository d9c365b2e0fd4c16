from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoflash.cli import bench_grid, bench_systems
from autoflash.cli.application import FAILED, main
from autoflash.evaluate import systems
from autoflash.problem import Mask, Pass
from tests import counters
from tests.cli.conftest import Filled
from tests.factories import make_device

SMALL = ["bench", "--systems", "--quick", "--seqlen", "128", "--full"]
ON_A_CPU = ["standard attention", "Rabe-Staats", "Rabe-Staats, key outer", "SDPA flash", "SDPA math"]


@pytest.mark.parametrize("op", list(Pass))
def test_systems_are_compared_and_written(op: Pass, run_json: Callable[..., Any], tmp_path: Path) -> None:
    report = run_json(*SMALL, "--pass", op.value, "--out", str(tmp_path))

    (compared,) = report["problems"]
    assert (compared["problem"]["pass"], compared["problem"]["seqlen_q"]) == (op.value, 128)
    rows = {row["system"]: row for row in compared["systems"]}
    assert list(rows) == ON_A_CPU
    outputs = ["out"] if op is Pass.FORWARD else ["dq", "dk", "dv"]
    for row in rows.values():
        assert row["reason"] == ""
        assert row["median_us"] > 0
        assert row["peak_bytes"] > 0
        assert row["gate"] <= 1.0
        assert list(row["errors"]) == outputs
    matrix = compared["problem"]["batch"] * 8 * 128 * 128 * 4
    assert rows["standard attention"]["peak_bytes"] >= 2 * matrix
    assert rows["standard attention"]["kept_bytes"] == (0 if op is Pass.FORWARD else matrix)
    assert rows["standard attention"]["traffic"]["total_bytes"] >= 4 * matrix
    assert rows["SDPA flash"]["traffic"] is None
    assert all(row["dram_read_bytes"] is None for row in rows.values())
    (written,) = tmp_path.glob("systems-*.json")
    assert json.loads(written.read_text()) == report
    tables = written.with_suffix(".md").read_text()
    assert f"| {op.value} | full | 64 | SDPA flash | - |" in tables
    assert "ncu" not in tables


def test_a_table_names_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--pass", "forward", "--seqlen", "64", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert "S64 D64" in text
    assert "HBM bytes (model)" in text
    assert "DRAM bytes (ncu)" not in text
    assert [line.split("  ")[0] for line in text.splitlines() if line.startswith(("standard", "Rabe", "SDPA"))] == [
        *ON_A_CPU,
        *ON_A_CPU,
    ]


def test_a_recorded_kernel_is_what_is_compared(filled: Filled, run_json: Callable[..., Any]) -> None:
    arguments = ["--pass", "forward", "--seqlen", "1024", "--causal"]
    report = run_json("bench", "--systems", *arguments)

    (compared,) = report["problems"]
    rows = {row["system"]: row["variant"] for row in compared["systems"]}
    assert rows["Rabe-Staats"] == filled.winner.to_dict()


def test_a_system_that_fails_is_a_line_with_a_reason(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = systems.executable_of

    def fail(system: systems.System, *arguments: Any) -> Any:
        if system.name == "Rabe-Staats":
            raise RuntimeError("out of memory")
        return make(system, *arguments)

    monkeypatch.setattr(systems, "executable_of", fail)
    report = run_json(*SMALL, "--pass", "forward")

    (compared,) = report["problems"]
    rows = {row["system"]: row for row in compared["systems"]}
    failed = rows["Rabe-Staats"]
    assert (failed["reason"], failed["median_us"], failed["peak_bytes"]) == ("RuntimeError: out of memory", None, None)
    assert failed["traffic"]["total_bytes"] > 0
    assert rows["SDPA math"]["median_us"] > 0


def test_features_leave_torchs_backends_out(run_json: Callable[..., Any]) -> None:
    report = run_json(*SMALL, "--pass", "forward", "--softcap", "20", "--window", "63,0")

    (compared,) = report["problems"]
    assert [row["system"] for row in compared["systems"]] == ON_A_CPU[:3]
    assert all(row["gate"] <= 1.0 for row in compared["systems"])


def test_what_standard_attention_is_not_written_for_is_said(run_json: Callable[..., Any]) -> None:
    report = run_json(*SMALL, "--pass", "forward", "--dropout", "0.1")

    (compared,) = report["problems"]
    first, second = compared["systems"][:2]
    assert "not compared with dropout" in first["reason"]
    assert second["gate"] <= 1.0


def test_a_call_that_takes_long_is_not_timed(run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "peak_and_seconds", lambda call, device: (4096, 7.25))
    report = run_json(*SMALL, "--pass", "forward")

    for row in report["problems"][0]["systems"]:
        assert (row["reason"], row["median_us"], row["peak_bytes"]) == ("a call takes 7.2 s: not timed", None, 4096)
        assert row["gate"] <= 1.0


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put an ncu in front of the PATH."""

    def install(before: str) -> None:
        counters.install(tmp_path / "bin", before=before)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    return install


# All that is asked for was done, in no time.
_DONE = """
reply = json.dumps({"reason": "", "stopped": False}) + "\\n"
last = json.dumps({"reason": "it does not fit", "stopped": False}) + "\\n"
Path(counted[-1]).write_text(4 * reply + last)
counted[1:3] = ["-c", ""]
"""


def test_counted_bytes_stand_beside_those_of_the_model(
    on_path: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_path(_DONE)

    assert main([*SMALL, "--pass", "forward", "--dram", "--out", str(tmp_path), "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    (file,) = tmp_path.glob("systems-*.json")
    report = json.loads(file.read_text())
    rows = {row["system"]: row for row in report["problems"][0]["systems"]}
    assert report["command"] == "autoflash bench --systems --quick --seqlen 128 --full --pass forward --dram"
    # The second of the two ranges of a call drives out what the first has written.
    assert (rows["Rabe-Staats"]["dram_read_bytes"], rows["Rabe-Staats"]["dram_write_bytes"]) == (3000, 2 + 3)
    assert (rows["SDPA math"]["dram_read_bytes"], rows["SDPA math"]["dram_reason"]) == (None, "it does not fit")
    assert "DRAM bytes (ncu)" in text
    assert "2.93 KiB" in text
    assert "it does not fit" in text
    tables = file.with_suffix(".md").read_text()
    assert "`autoflash bench --systems --quick --seqlen 128 --full --pass forward --dram` remakes it" in tables
    assert f"| forward | full | 64 | SDPA flash | - / {(7000 + 6 + 7) / 1024:.2f} KiB |" in tables


def test_times_are_kept_where_nothing_can_be_counted(
    on_path: Callable[[str], None], run_json: Callable[..., Any]
) -> None:
    on_path('log.write_text("==ERROR== ERR_NVGPUCTRPERM - no permission"); sys.exit(1)')

    report = run_json(*SMALL, "--pass", "forward", "--dram", code=FAILED)

    assert all(row["median_us"] > 0 and row["dram_read_bytes"] is None for row in report["problems"][0]["systems"])


def test_without_ncu_nothing_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert main([*SMALL, "--dram", "--device", "cpu"]) == FAILED

    captured = capsys.readouterr()
    assert "ncu is not on the PATH" in captured.err
    assert captured.out == ""


def test_counts_are_of_systems(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--dram", "--device", "cpu"]) == 2

    assert "--dram counts for --systems" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--exhaustive"], ["--overhead"], ["--readme", __file__]])
def test_it_is_a_run_of_its_own(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *option, "--device", "cpu"]) == 2

    assert "--systems" in capsys.readouterr().err


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("arch", ["cpu", "sm_90"])
def test_the_grid_is_smaller_than_that_of_speeds(arch: str, quick: bool) -> None:
    device = make_device(arch)
    full = bench_grid.default_grid(device, quick=quick)

    grid = bench_systems.default_grid(full, device, quick=quick)

    assert 0 < len(list(grid.problems())) <= len(list(full.problems()))
    assert {problem.mask for problem in grid.problems()} == {Mask.FULL}
    assert len({problem.seqlen_q for problem in grid.problems()}) == {"cpu": 1, "sm_90": 2 if quick else 3}[arch]
