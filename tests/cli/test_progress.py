from __future__ import annotations

import io

import pytest
from rich.console import Console

from autoflash.cli.progress import CellProgress, TuneProgress
from autoflash.trial import Status


def _cell(total: int = 10) -> CellProgress:
    return CellProgress(name="forward/bf16/d64", total=total, tflops=lambda us: 40_000.0 / us)


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=200, _environ={"TERM": "xterm"})


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_best_so_far_is_said_beside_the_vendors() -> None:
    cell = _cell()

    cell.take(Status.CORRECT, 200.0, vendor=True)
    cell.take(Status.CORRECT, 100.0, vendor=False)
    cell.take(Status.CORRECT, 150.0, vendor=False)
    cell.take(Status.COMPILE, None, vendor=False)

    assert cell.summary() == "best 400 TFLOP/s, 2.00x SDPA; correct 2, compile 1"
    assert cell.done == 3


def test_failures_alone_have_no_best() -> None:
    cell = _cell()

    cell.take(Status.TIMEOUT, None, vendor=False)

    assert cell.summary() == "timeout 1"


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    console, now = _console(terminal=False), [0.0]

    with TuneProgress(console, 10, clock=lambda: now[0]) as progress:
        progress.begin(_cell())
        progress.trial(Status.CORRECT, 100.0, vendor=False)
        now[0] = 11.0
        progress.trial(Status.CORRECT, 80.0, vendor=False)

    assert _text(console).splitlines() == [
        "forward/bf16/d64: 10 trials to do",
        "forward/bf16/d64: 2 of 10; best 500 TFLOP/s; correct 2",
    ]


def test_on_a_terminal_there_are_bars() -> None:
    console = _console(terminal=True)

    with TuneProgress(console, 10) as progress:
        progress.begin(_cell())
        progress.trial(Status.CORRECT, 100.0, vendor=False)
        progress.say("a line above")

    text = _text(console)
    assert "all cells" in text
    assert "best 400 TFLOP/s" in text
    assert "a line above" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_leaves_the_terminal_as_it_was(terminal: bool) -> None:
    progress = TuneProgress(_console(terminal=terminal), 10)

    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt

    assert progress._progress.live.is_started is False
