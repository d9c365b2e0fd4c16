from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from autoflash.cli.application import FAILED, USAGE, main
from autoflash.cli.plot import draw, panels_of

RESULTS = Path(__file__).parents[2] / "benchmarks" / "nvidia-h200.json"


def test_each_pass_mask_and_head_size_is_a_panel() -> None:
    panels = panels_of(json.loads(RESULTS.read_text())["rows"])

    assert len(panels) == 12
    forward = panels["forward", "causal", 128]
    assert list(forward) == ["generated", "SDPA cudnn", "SDPA flash"]
    assert sorted(forward["generated"]) == [512, 1024, 2048, 4096, 8192, 16384]


def test_a_kernel_that_could_not_run_is_left_out() -> None:
    rows = json.loads(RESULTS.read_text())["rows"][:1]
    rows[0]["vendors"]["cudnn"]["tflops"] = None

    assert list(panels_of(rows)["forward", "full", 64]) == ["generated", "SDPA flash"]


@pytest.mark.parametrize("head_dims", [[128], [64, 128], [64, 128, 256]])
def test_the_legend_is_as_wide_as_the_figure_at_most(head_dims: list[int]) -> None:
    names = ["generated", "SDPA cudnn", "SDPA flash", "FlashAttention-4", "FlexAttention"]
    curves = {name: {512: 100.0 + number, 1024: 200.0} for number, name in enumerate(names)}
    panels = {("step", "causal", head_dim): curves for head_dim in head_dims}

    figure = draw(panels, "NVIDIA H200 (torch 2.11.0+cu130, Triton 3.6, 2026-12-01)")
    figure.canvas.draw()

    assert figure.legends[0].get_window_extent().width <= figure.bbox.width


@pytest.fixture
def large_heads(tmp_path: Path) -> Path:
    """The results of one head size: a third of the panels, drawn in a third of the time."""
    results = json.loads(RESULTS.read_text())
    kept = tmp_path / "large_heads.json"
    kept.write_text(json.dumps({**results, "rows": [row for row in results["rows"] if row["head_dim"] == 256]}))
    return kept


def test_equal_results_give_equal_bytes(large_heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in ("first.svg", "second.svg")]

    codes = [main(["plot", str(large_heads), "--out", str(file), "--json"]) for file in files]

    assert codes == [0, 0]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert "backward, causal, D = 256" in files[0].read_text()
    assert json.loads(capsys.readouterr().out.split("}\n")[0] + "}") == {"file": str(files[0]), "panels": 4}


def test_other_formats_are_written(tmp_path: Path) -> None:
    assert main(["plot", str(RESULTS), "--out", str(tmp_path / "plot.png")]) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "name", "code", "words"),
    [
        ("{}", "plot.svg", FAILED, "is no results file"),
        ("[1]", "plot.svg", FAILED, "is no results file"),
        ("{", "plot.svg", FAILED, "is no JSON"),
        ("{}", "plot.gif", USAGE, "does not end in .svg, .png, .pdf"),
    ],
)
def test_what_cannot_be_drawn_is_said(
    content: str, name: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.json").write_text(content)

    assert main(["plot", str(tmp_path / "results.json"), "--out", str(tmp_path / name)]) == code

    assert words in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plot", str(RESULTS), "--out", str(tmp_path / "absent" / "plot.svg")]) == FAILED

    assert "cannot write" in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    assert main(["plot", str(RESULTS), "--out", str(tmp_path / "plot.svg")]) == FAILED

    assert "pip install 'autoflash[report]'" in capsys.readouterr().err
