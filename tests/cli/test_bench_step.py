"""A training step through autograd: who is timed, on what, by which records, and what becomes of one that fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoflash.cli import bench_grid, bench_step
from autoflash.cli.application import main
from autoflash.ops import CALLS
from autoflash.problem import Mask, Pass
from tests.cli.conftest import Filled
from tests.evaluate import fake_fa4
from tests.factories import make_device

STEP = ["bench", "--step", "--seqlen", "64", "--head-dim", "16"]


def test_a_gpu_has_the_steps_of_language_models() -> None:
    device = make_device()

    grid = bench_step.default_grid(bench_grid.default_grid(device, quick=False), device)

    problems = list(grid.problems())
    assert [problem.seqlen_q for problem in problems] == [2048, 4096, 8192, 16384]
    assert {(p.op, p.mask, p.head_dim) for p in problems} == {(Pass.BACKWARD, Mask.CAUSAL, 128)}


def test_a_step_is_both_passes(tmp_path: Path, run_json: Callable[..., Any]) -> None:
    report = run_json(*STEP, "--peers", "math,cudnn", "--out", str(tmp_path))

    (row,) = report["rows"]
    assert (row["pass"], row["mask"], row["head_dim"], row["seqlen"]) == ("step", "causal", 16, 64)
    # 16 sequences of 64 tokens, 512 numbers of a token; half of the pairs; two products and five.
    operations = 7 * 2 * 16 * 512 * 64 * 64 / 2
    timed = [row["generated"], row["dispatched"], row["vendors"]["math"]]
    assert [one["tflops"] for one in timed] == pytest.approx([operations / one["median_us"] * 1e-6 for one in timed])
    assert row["vendors"]["cudnn"]["reason"] == "torch has no cudnn backend on a CPU"
    assert {one["pass"] for one in report["summary"]} == {"step"}
    (written,) = tmp_path.glob("*-step-peers-d16-s64.json")
    assert json.loads(written.read_text()) == report


def test_the_table_and_the_plot_say_that_it_is_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "--device", "cpu", "--out", str(tmp_path)]) == 0

    text = capsys.readouterr().out
    assert "| step | causal | 16 |" in text
    assert "step: attention() to the fastest of them, 1 rows: geometric mean" in text
    (file,) = tmp_path.iterdir()
    assert main(["plot", str(file), "--out", str(tmp_path / "plot.svg")]) == 0
    assert ">step, causal" in (tmp_path / "plot.svg").read_text()


def test_calls_are_dispatched_by_the_records_that_are_named(
    filled: Filled, tmp_path: Path, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: set[str] = set()
    first = CALLS.first

    def watched(*arguments: Any, **options: Any) -> Any:
        prepared, result = first(*arguments, **options)
        ran.add(str(prepared.resolution.executable.variant))
        return prepared, result

    table = tmp_path / "table.json"
    assert main(["export", "--out", str(table)]) == 0
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "empty.sqlite"))
    monkeypatch.setattr(CALLS, "first", watched)

    (row,) = run_json("bench", "--step", "--seqlen", "1024", "--head-dim", "64", "--table", str(table))["rows"]

    assert row["generated"]["tflops"] is not None, row["generated"]["reason"]
    assert str(filled.winner) in ran
    assert not CALLS.prepared


def test_a_peer_with_other_gradients_is_a_reason(install: Callable[..., None], run_json: Callable[..., Any]) -> None:
    def without_mask(*tensors: torch.Tensor, **options: Any) -> object:
        return fake_fa4.flash_attn_func(*tensors, **(options | {"causal": False}))

    install(flash_attn_func=without_mask)

    (row,) = run_json(*STEP, "--dtype", "bf16", "--peers", "fa4,math")["rows"]

    assert "its dq differs from that of the generated kernel" in row["vendors"]["fa4"]["reason"]
    assert row["vendors"]["math"]["tflops"] > 0.0


@pytest.mark.parametrize(
    "others", [["--pass", "forward"], ["--systems"], ["--blocks"], ["--exhaustive"], ["--overhead"]]
)
def test_a_step_is_a_run_of_its_own(others: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, *others, "--device", "cpu"]) == 2

    assert "is a run of its own" in capsys.readouterr().err


def test_features_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*STEP, "--softcap", "20", "--device", "cpu"]) == 2

    assert "--step times plain attention" in capsys.readouterr().err
