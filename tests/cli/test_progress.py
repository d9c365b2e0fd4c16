from __future__ import annotations

import io

import pytest
from rich.console import Console

from autoflash.cli.progress import TuneProgress, cell_line
from autoflash.search.request import CellFinished, CellPlan, CellStarted, CellSummary, TrialFinished
from autoflash.trial import Decision, Status
from tests.factories import make_cell, make_environment, make_problem, make_ranked, make_variant

CELL = make_cell()
PLAN = CellPlan(cell=CELL, problem=make_problem(), variants=90, recorded=0, to_do=10)
STARTED = CellStarted(plan=PLAN, index=0, cells=2)


def _trial(done: int, status: Status = Status.CORRECT, best_us: float | None = 100.0) -> TrialFinished:
    return TrialFinished(
        cell=CELL,
        variant=make_variant(),
        status=status,
        detail="",
        median_us=best_us,
        best_us=best_us,
        vendor_us=200.0,
        done=done,
        total=10,
    )


def _summary(*, decided: bool, note: str = "") -> CellSummary:
    decision = Decision(
        cell=CELL,
        environment=make_environment(),
        choices=(make_ranked(median_us=100.0),),
        vendor=make_ranked(median_us=150.0),
        reason="",
        decided_at="2026-01-02T03:04:05+00:00",
    )
    return CellSummary(
        plan=PLAN,
        added={Status.CORRECT: 4},
        total=4,
        decision=decision if decided else None,
        is_new=decided,
        default_us=None,
        note=note,
        seconds=12.0,
    )


def _console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=250, _environ={"TERM": "xterm"})


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    console, now = _console(terminal=False), [0.0]

    with TuneProgress(console, [PLAN], clock=lambda: now[0]) as progress:
        progress(STARTED)
        progress(_trial(1))
        now[0] = 11.0
        progress(_trial(2, Status.COMPILE))
        progress(CellFinished(summary=_summary(decided=True)))

    lines = _text(console).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{CELL}: 2 of 10; best ")
    assert lines[0].endswith("TFLOP/s, 2.00x SDPA; correct 1, compile 1")
    assert "1.50x SDPA; 4 trials, 12 s" in lines[1]


def test_on_a_terminal_there_are_bars() -> None:
    console = _console(terminal=True)

    with TuneProgress(console, [PLAN]) as progress:
        progress(STARTED)
        progress(_trial(1))

    text = _text(console)
    assert "all cells" in text
    assert f"[1/2] {CELL}" in text
    assert "2.00x SDPA; correct 1" in text


def test_failures_alone_have_no_best() -> None:
    console = _console(terminal=True)

    with TuneProgress(console, [PLAN]) as progress:
        progress(STARTED)
        progress(_trial(1, Status.TIMEOUT, best_us=None))

    assert "timeout 1" in _text(console)
    assert "best" not in _text(console)


def test_recorded_trials_are_counted_for_the_last_word() -> None:
    with TuneProgress(_console(terminal=False), [PLAN]) as progress:
        progress(STARTED)
        progress(_trial(1))
        progress(_trial(2))

    assert progress.recorded == 2


def test_what_a_finished_cell_left_undone_is_no_longer_expected() -> None:
    progress = TuneProgress(_console(terminal=False), [PLAN])

    progress(STARTED)
    progress(_trial(4))
    progress(CellFinished(summary=_summary(decided=True)))

    assert progress._progress.tasks[progress._all].total == 4


def test_a_cell_without_a_decision_says_why() -> None:
    line = cell_line(_summary(decided=False, note="no candidate is correct: 4 compile"))

    assert line == f"{CELL}: nothing to dispatch by; no candidate is correct: 4 compile"


@pytest.mark.parametrize("terminal", [True, False])
def test_an_error_leaves_the_terminal_as_it_was(terminal: bool) -> None:
    progress = TuneProgress(_console(terminal=terminal), [PLAN])

    with pytest.raises(KeyboardInterrupt), progress:
        raise KeyboardInterrupt

    assert progress._progress.live.is_started is False
