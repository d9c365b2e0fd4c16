from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from autoflash.cli import bench, bench_grid, bench_overhead, bench_report, bench_sweep
from autoflash.cli.application import main
from autoflash.cli.bench_grid import Row, Timed
from autoflash.cli.bench_sweep import Sweep
from autoflash.cli.peers import Peers
from autoflash.problem import Mask, Pass, Problem
from autoflash.trial import Tier
from autoflash.variant import Family
from tests.cli.conftest import Filled
from tests.factories import make_device, make_measurement, make_problem, make_variant

SMALL = ["bench", "--quick", "--pass", "forward", "--seqlen", "256", "--full"]


def _timed(median_us: float | None, tflops: float | None = None) -> Timed:
    measurement = None if median_us is None else make_measurement(median_us=median_us)
    return Timed(variant=make_variant(), measurement=measurement, tflops=tflops)


def _row(problem: Problem, generated: float | None, dispatched: float | None = None, **vendors: float | None) -> Row:
    return Row(
        problem=problem,
        generated=_timed(1.0, generated),
        tier=Tier.EXACT,
        dispatched=_timed(1.0, generated if dispatched is None else dispatched),
        vendors={name: _timed(1.0, speed) for name, speed in vendors.items()},
    )


def test_the_grid_of_a_gpu_has_the_published_sizes() -> None:
    problems = list(bench_grid.default_grid(make_device(), quick=False).problems())

    assert len(problems) == 72
    assert {problem.batch * problem.seqlen_q for problem in problems} == {16384}
    assert {problem.heads * problem.head_dim for problem in problems} == {2048}
    assert {problem.seqlen_q for problem in problems} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {(problem.op, problem.mask) for problem in problems} == {(op, mask) for op in Pass for mask in Mask}


def test_features_are_asked_of_every_problem_and_no_vendor_is_timed(
    tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    features = ["--window", "15,0", "--softcap", "30"]

    report = run_json(*SMALL[:-3], "--seqlen", "64", "--head-dim", "16", "--causal", *features, "--out", str(tmp_path))

    (row,) = report["rows"]
    assert (row["mask"], row["features"], row["vendors"]) == ("causal", "softcap,window", {})
    assert row["generated"]["median_us"] > 0.0
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("-softcap-window")


def test_a_window_that_only_some_lengths_have_is_in_the_name_of_the_results(
    tmp_path: Path, run_json: Callable[..., Any]
) -> None:
    lengths = ["--seqlen", "32", "--seqlen", "64"]

    report = run_json(*SMALL[:-3], *lengths, "--head-dim", "16", "--causal", "--window", "40,0", "--out", str(tmp_path))

    assert [row["features"] for row in report["rows"]] == ["", "window"]
    assert [sorted(row["vendors"]) for row in report["rows"]] == [["flash", "math"], []]
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("-window")


def test_tables_name_the_features() -> None:
    row = _row(make_problem(mask=Mask.CAUSAL).replace(softcap=30.0), 300.0)

    assert bench_report.row_cells(row, Peers(names=()))[1] == "causal+softcap"
    assert bench_report.pivot([row], ())[1][0][1] == "causal+softcap"


def test_a_ratio_is_to_the_fastest_vendor_kernel() -> None:
    row = _row(make_problem(), 300.0, cudnn=600.0, flash=400.0)

    assert row.ratio == 0.5


def test_the_summary_has_generated_kernels_and_what_attention_runs() -> None:
    rows = [
        _row(make_problem(), 300.0, dispatched=600.0, cudnn=600.0, flash=400.0),
        _row(make_problem(), 400.0, cudnn=200.0),
        _row(make_problem(op=Pass.BACKWARD), None, cudnn=200.0),
    ]

    assert [str(line) for line in bench_report.summary(rows, ("cudnn", "flash"))] == [
        "forward: generated to cudnn, 2 rows: geometric mean 1.000, lowest 0.50",
        "forward: generated to flash, 1 rows: geometric mean 0.750, lowest 0.75",
        "forward: generated to the fastest of them, 2 rows: geometric mean 1.000, lowest 0.50",
        "forward: attention() to the fastest of them, 2 rows: geometric mean 1.414, lowest 1.00",
    ]


def test_flex_attention_is_a_peer_of_featured_problems(run_json: Callable[..., Any]) -> None:
    report = run_json("bench", "--pass", "forward", "--seqlen", "64", "--head-dim", "16", "--window", "15,0", "--flex")

    assert {row["features"] for row in report["rows"]} == {"window"}
    for row in report["rows"]:
        assert "compared on GPUs" in row["vendors"]["flex"]["reason"]
        assert row["generated"]["median_us"] > 0.0


def test_grouped_heads_share_keys_and_values() -> None:
    grid = bench_grid.default_grid(make_device(), quick=False)

    problems = list(dataclasses.replace(grid, group=8, head_dims=(64, 256)).problems())

    assert {(problem.heads, problem.kv_heads) for problem in problems} == {(32, 4), (8, 1)}


@pytest.mark.parametrize("other", ["--systems", "--exhaustive", "--overhead"])
def test_flex_attention_is_compared_on_the_grid_alone(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--flex", other]) == 2

    assert "--flex is a peer of the grid" in capsys.readouterr().err


def test_there_is_no_ratio_without_a_vendor_kernel() -> None:
    assert _row(make_problem(), 300.0, cudnn=None).ratio is None


def test_the_short_table_has_lengths_across() -> None:
    rows = [
        _row(make_problem(head_dim=128, seqlen_q=512), 512.4, cudnn=600.0, flash=None),
        _row(make_problem(head_dim=128, seqlen_q=1024), 550.0, cudnn=640.0, flash=500.0),
    ]

    columns, lines = bench_report.pivot(rows, ("cudnn", "flash"))

    assert [column.title for column in columns] == ["pass", "mask", "D", "S=512", "S=1024"]
    assert lines == [["forward", "full", "128", "512 / 600 / -", "550 / 640 / 500"]]


def test_the_table_replaces_the_one_before(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"head\n{bench.README_BEGIN}\nold\n{bench.README_END}\ntail\n")

    bench._put_into(readme, "new\n")
    bench._put_into(readme, "newer\n")

    assert readme.read_text() == f"head\n{bench.README_BEGIN}\nnewer\n{bench.README_END}\ntail\n"


def test_a_readme_without_marks_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("nothing here")

    with pytest.raises(click.UsageError, match="benchmark table"):
        bench._put_into(readme, "new\n")

    assert readme.read_text() == "nothing here"


def test_the_readme_has_the_marks() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()

    assert readme.index(bench.README_BEGIN) < readme.index(bench.README_END)


def test_regret_is_to_the_best_of_the_final_comparison() -> None:
    sweep = Sweep(
        screened=(_timed(100.0), _timed(None), _timed(400.0)),
        winner=_timed(110.0),
        default=_timed(300.0),
        finalists=(_timed(100.0), _timed(105.0)),
    )

    assert sweep.regret == pytest.approx(0.1)
    assert sweep.spread == pytest.approx(4.0)


def test_a_winner_that_is_the_best_has_no_regret() -> None:
    sweep = Sweep(screened=(_timed(90.0),), winner=_timed(90.0), default=_timed(300.0), finalists=(_timed(95.0),))

    assert sweep.regret == 0.0


def test_the_grid_runs_on_a_cpu_and_is_written(
    run_json: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_json(*SMALL, "--out", str(tmp_path))

    (row,) = report["rows"]
    assert (row["pass"], row["seqlen"], row["tier"]) == ("forward", 256, "default")
    assert row["generated"]["variant"]["family"] == Family.TORCH_TILED.value
    assert row["generated"]["tflops"] > 0
    assert row["vendors"]["math"]["tflops"] > 0
    (written,) = tmp_path.glob("*.json")
    assert json.loads(written.read_text())["rows"] == report["rows"]


def test_the_recorded_winner_is_what_is_timed(filled: Filled, run_json: Callable[..., Any]) -> None:
    report = run_json("bench", "--quick", "--pass", "forward", "--seqlen", "1024", "--causal")

    assert report["rows"][0]["generated"]["variant"] == filled.winner.to_dict()


def test_a_sweep_judges_the_winner(run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_sweep, "FINALISTS", 2)

    (report,) = run_json("bench", "--exhaustive", "--quick", "--pass", "forward", "--full", "--seqlen", "64")

    assert report["regret"] >= 0
    assert report["spread"] >= 1
    assert len(report["screened"]) == report["variants"] > 1


def test_host_time_is_printed_beside_that_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--overhead", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert "torch SDPA" in text
    assert 'autoflash.attention(vendor="never")' in text
    assert "with gradients us" in text


def test_host_times_of_both_are_written_as_json(run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_overhead.overhead, "STEPS", 2)

    times = run_json("bench", "--overhead")

    names = {f"{name}{step}_us" for name in ("generated", "allow", "sdpa") for step in ("", "_step")}
    assert set(times) == names
    assert all(us > 0 for us in times.values())


def test_an_interrupted_run_keeps_what_it_has_beside_what_was_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["bench", "--device", "cpu", "--head-dim", "16", "--pass", "forward", "--causal", "--out", str(tmp_path)]
    readme = tmp_path / "page.md"
    text = f"{bench.README_BEGIN}\nas it was\n{bench.README_END}\n"
    readme.write_text(text)
    timed = bench_grid.time_together

    def interrupt(problem: Problem, *arguments: Any, **options: Any) -> Any:
        if problem.seqlen_q == 64:
            raise KeyboardInterrupt
        return timed(problem, *arguments, **options)

    assert main([*small, "--seqlen", "32", "--seqlen", "64"]) == 0
    (whole,) = tmp_path.glob("*.json")
    before = whole.read_bytes()
    monkeypatch.setattr(bench_grid, "time_together", interrupt)
    capsys.readouterr()

    assert main([*small, "--seqlen", "32", "--seqlen", "64", "--readme", str(readme)]) == 130

    said = capsys.readouterr()
    assert "Stopped: 1 of 2 problems were not timed." in said.err
    assert "| forward | causal | 16 |" in said.out
    (partial,) = tmp_path.glob("*-partial.json")
    assert [row["seqlen"] for row in json.loads(partial.read_text())["rows"]] == [32]
    assert whole.read_bytes() == before
    assert readme.read_text() == text
