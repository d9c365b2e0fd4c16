"""Progress of a tuning run: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autoflash.evaluate.cost import tflops
from autoflash.problem import Problem
from autoflash.search.request import (
    CellFinished,
    CellPlan,
    CellStarted,
    CellSummary,
    Event,
    FinalsStarted,
    TrialFinished,
)
from autoflash.trial import Status

SILENCE_S = 10.0
"""Without a terminal, at most one line in so many seconds while a cell is tuned."""


class TuneProgress:
    """Bars (or lines) for one tuning run; an event handler of the tuner.

    Args:
        console: Standard error, so that standard output can be piped.
        plans: What the run will do.
        clock: Seconds; for tests.
    """

    def __init__(
        self, console: Console, plans: Sequence[CellPlan], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.recorded = 0
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._statuses: Counter[Status] = Counter()
        self._problem: Problem | None = None
        self._left = {plan.cell: plan.to_do for plan in plans}
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[summary]}", markup=False),
            console=console,
            # Bars on a dumb terminal or in a log file are noise.
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._all = self._progress.add_task("all cells", total=max(1, sum(self._left.values())), summary="")
        self._cell = self._progress.add_task("", total=1, summary="", visible=False)

    def __enter__(self) -> TuneProgress:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Show what the tuner says."""
        if isinstance(event, CellStarted):
            self._begin(event)
        elif isinstance(event, TrialFinished):
            self._trial(event)
        elif isinstance(event, FinalsStarted):
            self._progress.update(self._cell, summary=f"verifying and comparing the best {event.finalists}")
        elif isinstance(event, CellFinished):
            self._end(event.summary)

    def _begin(self, event: CellStarted) -> None:
        plan = event.plan
        self._problem = plan.problem
        self._statuses.clear()
        self._progress.reset(
            self._cell,
            total=max(1, plan.recorded + plan.to_do),
            completed=plan.recorded,
            description=f"[{event.index + 1}/{event.cells}] {plan.cell}",
        )
        self._progress.update(self._cell, visible=True, summary="")

    def _trial(self, event: TrialFinished) -> None:
        self.recorded += 1
        self._statuses[event.status] += 1
        before = self._progress.tasks[self._cell].completed
        self._progress.update(self._cell, completed=event.done, total=max(1, event.total), summary=self._words(event))
        self._progress.advance(self._all, max(0, event.done - before))
        self._left[event.cell] = event.total - event.done
        if self._progress.disable and self._clock() - self._last_line >= SILENCE_S:
            self._line(f"{event.cell}: {event.done} of {event.total}; {self._words(event)}")

    def _words(self, event: TrialFinished) -> str:
        """Such as ``best 412.0 TFLOP/s, 1.05x SDPA; correct 12, compile 3``."""
        best = ""
        if event.best_us is not None and self._problem is not None:
            best = f"best {rate(self._problem, event.best_us)} TFLOP/s"
            best += f", {event.vendor_us / event.best_us:.2f}x SDPA; " if event.vendor_us is not None else "; "
        return best + ", ".join(f"{status.value} {count}" for status, count in self._statuses.most_common())

    def _end(self, summary: CellSummary) -> None:
        """What this cell will not do any more is taken off the whole."""
        rest = self._left.pop(summary.cell, 0)
        whole = self._progress.tasks[self._all]
        if rest and whole.total is not None:
            self._progress.update(self._all, total=max(1.0, whole.total - rest))
        self._line(cell_line(summary))

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def rate(problem: Problem, median_us: float) -> str:
    """TFLOP/s with three digits that say something."""
    speed = tflops(problem, median_us)
    return f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}" if speed >= 10 else f"{speed:.3f}"


def cell_line(summary: CellSummary) -> str:
    """One line on a cell that is done."""
    decision = summary.decision
    if decision is None or not decision.choices:
        return f"{summary.cell}: nothing to dispatch by; {summary.note}"
    first = decision.choices[0]
    words = f"{summary.cell}: {first.variant}, {rate(summary.plan.problem, first.median_us)} TFLOP/s"
    if decision.vendor is not None:
        words += f", {decision.vendor.median_us / first.median_us:.2f}x SDPA"
    words += f"; {summary.total} trials, {summary.seconds:.0f} s"
    return words + (f" ({summary.note})" if summary.note else "")
