"""How many trials a run adds to each family of a cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoflash.dispatch.buckets import problem_of
from autoflash.problem import Cell
from autoflash.search.records import Records
from autoflash.search.request import CellPlan, TuneRequest
from autoflash.space import catalog
from autoflash.trial import Status, Trial
from autoflash.variant import Family


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a run adds to one family of a cell.

    Attributes:
        variants: How many its space holds.
        counted: Those that count already.
        to_do: Trials that the run adds.
    """

    variants: int
    counted: int
    to_do: int


def goals(request: TuneRequest, records: Records | None, families: Sequence[Family], cell: Cell) -> dict[Family, Goal]:
    """Trials to do, shared alike among the families; what a small space cannot use goes to the others.

    Asked again when a family's turn comes, it leaves out what others have done since.
    """
    sizes = {family: len(catalog.search_space(cell, request.device, family).variants()) for family in families}
    counted = dict.fromkeys(families, 0)
    if records is not None:
        counted = {family: count(records.trials(cell, family=family)) for family in families}
    if request.more is None:
        totals = shared_out(request.trials, sizes)
        to_do = {family: max(0, totals[family] - counted[family]) for family in families}
    else:
        to_do = shared_out(request.more, {family: max(0, sizes[family] - counted[family]) for family in families})
    return {family: Goal(variants=sizes[family], counted=counted[family], to_do=to_do[family]) for family in families}


def plan_cell(request: TuneRequest, records: Records | None, families: Sequence[Family], cell: Cell) -> CellPlan:
    """The goals of all families together."""
    every = goals(request, records, families, cell).values()
    return CellPlan(
        cell=cell,
        problem=problem_of(cell, request.device),
        variants=sum(goal.variants for goal in every),
        recorded=sum(goal.counted for goal in every),
        to_do=sum(goal.to_do for goal in every),
    )


def shared_out(trials: int, room: Mapping[Family, int]) -> dict[Family, int]:
    """Equal shares of a number of trials, as far as there is room; the earlier families get what is left over."""
    shares = dict.fromkeys(room, 0)
    while trials > 0 and (open_ones := [family for family in room if shares[family] < room[family]]):
        each = max(1, trials // len(open_ones))
        for family in open_ones:
            given = min(each, room[family] - shares[family], trials)
            shares[family] += given
            trials -= given
    return shares


def count(trials: Iterable[Trial]) -> int:
    """Distinct variants that were really tried: a static refusal costs nothing and counts nothing."""
    return len({trial.variant for trial in trials if trial.status is not Status.CONSTRAINTS})
