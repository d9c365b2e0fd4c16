"""Progress of a tuning run: bars on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from autoflash.trial import Status

SILENCE_S = 10.0
"""Without a terminal, at most one line in so many seconds while a cell is tuned."""


@dataclass(slots=True)
class CellProgress:
    """What is known of the cell that is being tuned.

    Attributes:
        name: Of the cell.
        total: Trials that it will have in the end.
        tflops: From microseconds; for its problem.
        done: Trials finished, those of earlier runs included.
        statuses: Of the trials of this run.
        best_us: Of the generated kernels so far; None before the first correct one.
        vendor_us: Of the fastest vendor kernel so far; None where there is none.
    """

    name: str
    total: int
    tflops: Callable[[float], float]
    done: int = 0
    statuses: Counter[Status] = field(default_factory=Counter)
    best_us: float | None = None
    vendor_us: float | None = None

    def take(self, status: Status, median_us: float | None, *, vendor: bool) -> None:
        """Count a finished trial."""
        if vendor:
            self.vendor_us = _faster(self.vendor_us, median_us)
            return
        self.done += 1
        self.statuses[status] += 1
        self.best_us = _faster(self.best_us, median_us)

    def summary(self) -> str:
        """Such as ``best 412.0 TFLOP/s, 1.05x SDPA; correct 12, compile 3``."""
        words = []
        if self.best_us is not None:
            speed = self.tflops(self.best_us)
            words.append(f"best {speed:.0f} TFLOP/s" if speed >= 10 else f"best {speed:.3f} TFLOP/s")
            if self.vendor_us is not None:
                words[0] += f", {self.vendor_us / self.best_us:.2f}x SDPA"
        if self.statuses:
            words.append(", ".join(f"{status.value} {count}" for status, count in self.statuses.most_common()))
        return "; ".join(words)


def _faster(one: float | None, other: float | None) -> float | None:
    times = [us for us in (one, other) if us is not None]
    return min(times, default=None)


class TuneProgress:
    """Bars (or lines) for one tuning run.

    Args:
        console: Standard error, so that standard output can be piped.
        trials: Expected in all cells together.
        clock: Seconds; for tests.
    """

    def __init__(self, console: Console, trials: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last_line = clock()
        self._cell: CellProgress | None = None
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[summary]}"),
            console=console,
            # Bars on a dumb terminal or in a log file are noise.
            disable=not console.is_terminal or console.is_dumb_terminal,
        )
        self._all = self._progress.add_task("all cells", total=max(1, trials), summary="")
        self._bar = self._progress.add_task("", total=1, summary="", visible=False)

    def __enter__(self) -> TuneProgress:
        """Begin to draw."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the terminal as it was."""
        self._progress.stop()

    def begin(self, cell: CellProgress) -> None:
        """A cell is tuned from now on."""
        self._cell = cell
        self._progress.reset(self._bar, total=max(1, cell.total), completed=cell.done, description=cell.name)
        self._progress.update(self._bar, visible=True, summary="")
        if self._progress.disable:
            self._line(f"{cell.name}: {cell.total - cell.done} trials to do")

    def trial(self, status: Status, median_us: float | None, *, vendor: bool) -> None:
        """A trial of the cell has finished."""
        cell = self._cell
        if cell is None:
            return
        cell.take(status, median_us, vendor=vendor)
        if not vendor:
            self._progress.advance(self._all)
        self._progress.update(self._bar, completed=cell.done, summary=cell.summary())
        if self._progress.disable and self._clock() - self._last_line >= SILENCE_S:
            self._line(f"{cell.name}: {cell.done} of {cell.total}; {cell.summary()}")

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
