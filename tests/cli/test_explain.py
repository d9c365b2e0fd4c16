from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.control import forget
from autoflash.problem import Cell
from tests.cli.conftest import Filled


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    forget()


def test_the_recorded_winner_is_explained(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--causal", "--vendor", "never"]) == 0

    text = capsys.readouterr().out
    assert str(filled.winner.config) in text
    assert "900" in text


def test_without_records_it_says_that_nothing_was_measured(run_json: Callable[..., Any]) -> None:
    printed = run_json("explain", "--vendor", "never")

    assert "not measured here" in str(printed)


def test_both_passes_are_explained_where_gradients_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--pass", "backward", "--vendor", "never"]) == 0

    text = capsys.readouterr().out
    assert "forward" in text
    assert "backward" in text


def test_warmup_runs_the_kernel_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmup", "--device", "cpu", "--seqlen", "64", "--heads", "2", "--vendor", "never"]) == 0

    assert "torch_tiled" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "features"),
    [
        ("--causal --window 63,0 --softcap 30", "causal+softcap+window/w64"),
        ("--bool-mask --dropout 0.1", "full+bool_mask+dropout"),
        ("--float-mask --head-dim-v 32", "full+float_mask"),
        ("--varlen --batch 3 --kv-heads 2", "full+varlen"),
    ],
)
@pytest.mark.parametrize("op", ["forward", "backward"])
def test_features_are_explained(op: str, arguments: str, features: str, run_json: Callable[..., Any]) -> None:
    printed = run_json("explain", "--seqlen", "256", "--pass", op, *arguments.split())

    cells = [Cell.from_dict(part["cell"]) for part in printed["passes"]]
    assert [cell.op.value for cell in cells] == ["forward", "backward"][: len(cells)]
    assert all(features in str(cell) for cell in cells)
    assert len(cells) == (2 if op == "backward" else 1)
    assert all(part["variant"]["family"] == "torch_tiled" for part in printed["passes"])


@pytest.mark.parametrize("arguments", ["--window 7,7 --float-mask", "--varlen --batch 3 --causal"])
def test_warmup_runs_features(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["warmup", "--device", "cpu", "--seqlen", "32", "--heads", "2", "--head-dim", "16", *arguments.split()])
        == 0
    )

    output = capsys.readouterr().out
    assert "torch_tiled" in output
    assert "has not run" not in output


def test_heads_that_do_not_fit_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--heads", "8", "--kv-heads", "3"]) == 2

    assert "8 and 3" in capsys.readouterr().err
