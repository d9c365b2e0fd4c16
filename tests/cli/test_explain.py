from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autoflash.cli.application import main
from autoflash.control import forget
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


def test_heads_that_do_not_fit_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--device", "cpu", "--heads", "8", "--kv-heads", "3"]) == 2

    assert "8 and 3" in capsys.readouterr().err
