"""Who is timed beside generated kernels, and what becomes of one that cannot, fails or is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoflash.cli import peers
from autoflash.cli.application import main
from autoflash.evaluate import fa4
from autoflash.problem import Problem
from tests.evaluate import fake_fa4

SMALL = ["bench", "--seqlen", "64", "--head-dim", "16", "--dtype", "bf16"]
FORWARD = [*SMALL, "--pass", "forward", "--causal"]


def test_an_unknown_peer_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FORWARD, "--peers", "cudnn,fa5"]) == 2

    text = " ".join(capsys.readouterr().err.split())
    assert "'fa5' is no peer; write some of cudnn,flash,efficient,math,fa4,flex,efficient_bias" in text


@pytest.mark.parametrize("text", ["", "cudnn,,flash"])
def test_an_empty_name_is_no_peer(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FORWARD, "--peers", text]) == 2

    assert "is no peer" in capsys.readouterr().err


def test_there_is_one_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FORWARD, "--grid", "fb"]) == 2

    assert "'fa'" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--systems", "--exhaustive", "--overhead"])
def test_peers_are_compared_on_the_grid_alone(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--peers", "flex", other]) == 2

    assert "--peers are peers of the grid" in capsys.readouterr().err


def test_each_named_peer_has_a_time_or_a_reason(
    run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, fa4.MODULE, None)
    options = ["--grid", "fa", "--peers", "fa4, cudnn,math,fa4", "--group", "8"]

    report = run_json(*SMALL, *options, "--out", str(tmp_path))

    assert len(report["rows"]) == 4
    for row in report["rows"]:
        assert list(row["vendors"]) == ["fa4", "cudnn", "math"]
        assert "pip install flash-attn-4" in row["vendors"]["fa4"]["reason"]
        assert row["vendors"]["cudnn"]["reason"] == "torch has no cudnn backend on a CPU"
        assert row["heads"] == 8 * row["kv_heads"]
        assert row["ratios"] == {"fa4": None, "cudnn": None, "math": row["ratio"]}
    assert report["command"] == (
        "autoflash bench --seqlen 64 --head-dim 16 --dtype bf16 --grid fa --peers 'fa4, cudnn,math,fa4' --group 8"
    )
    assert {one["what"] for one in report["summary"] if one["rows"] == 2} == {
        "generated to math",
        "generated to the fastest of them",
        "attention() to the fastest of them",
    }
    (file,) = tmp_path.iterdir()
    assert file.stem.endswith("-group8-peers-bf16-d16-s64")


def test_peers_that_are_named_have_their_reasons_with_features(run_json: Callable[..., Any]) -> None:
    report = run_json(*FORWARD, "--window", "15,0", "--peers", "flash")

    assert report["rows"][0]["vendors"]["flash"]["reason"] == "torch's kernels are not asked for window"


def test_flex_joins_those_that_are_named(run_json: Callable[..., Any]) -> None:
    report = run_json(*FORWARD, "--peers", "math", "--flex")

    assert list(report["rows"][0]["vendors"]) == ["math", "flex"]


def test_the_tables_have_ratios_reasons_and_versions(
    install: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    install()

    assert main([*SMALL, "--causal", "--peers", "math,fa4,flex", "--device", "cpu"]) == 0

    text = capsys.readouterr().out
    assert " ".join(text.splitlines()[1].split()[4:-1]) == "generated math fa4 flex / math / fa4 / flex / best"
    assert "generated / SDPA math / FlashAttention-4 / FlexAttention, on" in text
    assert "flash-attn-4 4.0.0" in text
    options = "--seqlen 64 --head-dim 16 --dtype bf16 --causal --peers math,fa4,flex"
    assert f"`scripts/benchmark {options}` remakes it" in text
    for op in ("forward", "backward"):
        assert f"{op}: generated to fa4, 1 rows: geometric mean" in text
        assert f"{op}: no time of flex in 1 rows: flex_attention is compared on GPUs" in text


def test_the_plot_names_peers(install: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    assert main([*FORWARD, "--peers", "math,fa4", "--device", "cpu", "--out", str(tmp_path)]) == 0
    (file,) = tmp_path.iterdir()

    assert main(["plot", str(file), "--out", str(tmp_path / "plot.svg")]) == 0

    assert json.loads(file.read_text())["peer_versions"] == {"fa4": "flash-attn-4 4.0.0"}
    text = (tmp_path / "plot.svg").read_text()
    assert all(f">{name}<" in text for name in ("generated", "SDPA math", "FlashAttention-4"))


class CompilePending(BaseException):
    """As compilers raise them that work ahead."""


@pytest.mark.parametrize("error", [RuntimeError, CompilePending, SystemExit])
def test_a_peer_that_raises_is_a_reason(
    error: type[BaseException], install: Callable[..., None], run_json: Callable[..., Any]
) -> None:
    def fail(*tensors: torch.Tensor, **options: object) -> None:
        raise error("no such tile")

    install(flash_attn_func=fail)

    (row,) = run_json(*FORWARD, "--peers", "fa4,math")["rows"]

    assert row["vendors"]["fa4"]["reason"] == f"{error.__name__}: no such tile"
    assert row["vendors"]["math"]["tflops"] > 0.0
    assert row["generated"]["tflops"] > 0.0


def test_who_interrupts_is_heard(install: Callable[..., None]) -> None:
    def interrupt(*tensors: torch.Tensor, **options: object) -> None:
        raise KeyboardInterrupt

    install(flash_attn_func=interrupt)

    assert main([*FORWARD, "--peers", "fa4", "--device", "cpu"]) == 130


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_a_peer_that_computes_something_else_is_a_reason(
    op: str, install: Callable[..., None], run_json: Callable[..., Any]
) -> None:
    def without_mask(*tensors: torch.Tensor, **options: Any) -> object:
        return fake_fa4.flash_attn_func(*tensors, **(options | {"causal": False}))

    install(flash_attn_func=without_mask)

    (row,) = run_json(*SMALL, "--pass", op, "--causal", "--peers", "fa4,math")["rows"]

    name = "out" if op == "forward" else "dq"
    assert row["vendors"]["fa4"]["tflops"] is None
    assert f"its {name} differs from that of the generated kernel" in row["vendors"]["fa4"]["reason"]
    assert row["ratio"] == row["ratios"]["math"]


def test_a_peer_that_fails_when_timed_leaves_the_other_rows_alone(
    install: Callable[..., None], run_json: Callable[..., Any]
) -> None:
    calls = []

    def fail_later(*tensors: torch.Tensor, **options: Any) -> object:
        calls.append(tensors)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return fake_fa4.flash_attn_func(*tensors, **options)

    install(flash_attn_func=fail_later)

    first, second = run_json(*FORWARD, "--seqlen", "32", "--peers", "fa4")["rows"]

    assert first["generated"]["reason"] == "when timed: RuntimeError: out of luck"
    assert second["vendors"]["fa4"]["tflops"] > 0.0


def test_what_compiles_is_told_before(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any]
) -> None:
    told: list[str] = []
    real = peers.executable

    def executable(problem: Problem, *rest: Any) -> Any:
        assert told
        return real(problem, *rest)

    install()
    monkeypatch.setattr(peers, "executable", executable)
    monkeypatch.setattr("rich.progress.Progress.update", lambda *_, description="", **__: told.append(description))

    run_json(*FORWARD, "--peers", "fa4")

    assert [words.split(": preparing ")[1] for words in told if words][:2] == ["generated", "fa4"]
