"""What a tuning run is asked to do, what it says while it does it, and what it says in the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoflash.device import Device
from autoflash.evaluate.evaluator import DEFAULT_BINDER
from autoflash.evaluate.isolated import TimeLimits
from autoflash.problem import Cell, Problem
from autoflash.trial import Decision, Status
from autoflash.variant import Family, Variant

DEFAULT_TRIALS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneRequest:
    """One run of the tuner.

    Attributes:
        cells: In this order; neighbours next to each other warm-start one another.
        device: Where.
        trials: Finished distinct generated variants that each cell shall have in all, those of earlier runs included.
        more: Instead of ``trials``: how many this run adds to each cell.
        budget_s: Wall clock for the whole run, shared among the cells; None for no limit.
        seed: Of the search; None for one that no other run has.
        workers: Processes that compile; None for as many as there are cores to spare.
        families: Generated families to search; None for the best that runs on the device.
        vendors: Also try the vendor's kernels.
        binder: ``module:function`` that makes executables.
        limits: Time-outs of the worker process.
    """

    cells: tuple[Cell, ...]
    device: Device
    trials: int = DEFAULT_TRIALS
    more: int | None = None
    budget_s: float | None = None
    seed: int | None = None
    workers: int | None = None
    families: tuple[Family, ...] | None = None
    vendors: bool = True
    binder: str = DEFAULT_BINDER
    limits: TimeLimits = field(default_factory=TimeLimits)


@dataclass(frozen=True, slots=True, kw_only=True)
class CellPlan:
    """What a run would do with a cell.

    Attributes:
        cell, problem: What is tuned, and the sizes that stand for it.
        variants: How many the search spaces hold.
        recorded: Distinct generated variants that count already.
        to_do: Trials that the run would add.
    """

    cell: Cell
    problem: Problem
    variants: int
    recorded: int
    to_do: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStarted:
    """A cell is about to be tuned."""

    plan: CellPlan
    index: int
    cells: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFinished:
    """A trial was recorded.

    Attributes:
        cell, variant, status, detail: What, and what came of it.
        median_us: Its time; None unless correct.
        best_us: Fastest generated kernel so far; None before the first.
        vendor_us: Fastest vendor kernel so far; None where there is none.
        done, total: Trials of the cell, vendor kernels not counted.
    """

    cell: Cell
    variant: Variant
    status: Status
    detail: str
    median_us: float | None
    best_us: float | None
    vendor_us: float | None
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FinalsStarted:
    """The best of a cell are about to be verified on the full grid and timed in turns."""

    cell: Cell
    finalists: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """What came of a cell.

    Attributes:
        plan: What was to be done.
        added: Trials that this run added, by status; static refusals and vendor kernels included.
        total: Distinct generated variants that count now.
        decision: The decision that holds now; None where there is none.
        is_new: Whether this run made it.
        default_us: The default of the same comparison; None where it was not in it.
        note: Why there is no new decision; empty where there is one.
        seconds: Wall clock.
    """

    plan: CellPlan
    added: Mapping[Status, int]
    total: int
    decision: Decision | None
    is_new: bool
    default_us: float | None
    note: str
    seconds: float

    @property
    def cell(self) -> Cell:
        """The cell."""
        return self.plan.cell

    @property
    def is_complete(self) -> bool:
        """Whether there is a decision to dispatch by."""
        return self.decision is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFinished:
    """A cell is done."""

    summary: CellSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSummary:
    """What came of a run.

    Attributes:
        cells: In the order of the request, as far as the budget went.
        unreached: Cells for which no time was left.
        seed: That the search used.
        seconds: Wall clock.
    """

    cells: tuple[CellSummary, ...]
    unreached: tuple[Cell, ...]
    seed: int
    seconds: float

    @property
    def failed(self) -> tuple[CellSummary, ...]:
        """Cells that were tried and have nothing to dispatch by."""
        return tuple(summary for summary in self.cells if not summary.is_complete)


Event = CellStarted | TrialFinished | FinalsStarted | CellFinished
