from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from autoflash.cli.application import main
from autoflash.cli.plot_systems import panels_of
from autoflash.problem import Pass

GIB = 2**30


def report_of(*, is_counted: bool) -> dict[str, Any]:
    """A results file of two lengths in both passes: one system that has a model, and one that has none."""

    def row(name: str, modelled: int | None, read: int) -> dict[str, Any]:
        return {
            "system": name,
            "traffic": None if modelled is None else {"total_bytes": modelled},
            "dram_read_bytes": read if is_counted else None,
            "dram_write_bytes": GIB if is_counted else None,
        }

    problems = [
        {
            "problem": {"pass": op.value, "mask": "full", "head_dim": 64, "seqlen_q": seqlen},
            "systems": [row("standard attention", seqlen * GIB, seqlen * GIB), row("SDPA cudnn", None, GIB)],
        }
        for op in Pass
        for seqlen in (1024, 4096)
    ]
    about = {"device": "A GPU", "torch": "2.13", "triton": "3.6", "date": "2026-01-01"}
    command = "autoflash bench --systems" + " --dram" * is_counted
    return {**about, "command": command, "problems": problems}


def test_a_panel_has_the_systems_of_a_known_algorithm() -> None:
    panels = panels_of(report_of(is_counted=True)["problems"])

    assert list(panels) == [("forward", "full", 64), ("backward", "full", 64)]
    lines = panels["forward", "full", 64]
    assert list(lines) == ["standard attention"]
    modelled, counted = lines["standard attention"]
    assert modelled == {1024: 1024 * GIB, 4096: 4096 * GIB}
    assert counted == {1024: 1025 * GIB, 4096: 4097 * GIB}


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    results, files = tmp_path / "systems.json", [tmp_path / name for name in ("first.svg", "second.svg")]
    results.write_text(json.dumps(report_of(is_counted=True)))

    assert [main(["plot", str(results), "--out", str(file)]) for file in files] == [0, 0]

    assert files[0].read_bytes() == files[1].read_bytes()
    text = files[0].read_text()
    assert "backward, full, D = 64" in text
    assert all(label in text for label in ("standard attention", "counted by ncu", "IO model", "A GPU (torch 2.13"))
    assert "SDPA cudnn" not in text


def test_without_counts_the_model_is_drawn_alone(tmp_path: Path) -> None:
    results = tmp_path / "systems.json"
    results.write_text(json.dumps(report_of(is_counted=False)))

    assert main(["plot", str(results), "--out", str(tmp_path / "systems.svg")]) == 0

    text = (tmp_path / "systems.svg").read_text()
    assert "IO model" in text
    assert "counted by ncu" not in text
