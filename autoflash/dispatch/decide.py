"""The policy that turns trials into a decision. Pure: the same trials, in any order, give the same decision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from autoflash.device import Device, DeviceKind
from autoflash.problem import Cell
from autoflash.space import catalog
from autoflash.trial import Decision, Environment, Level, Measurement, Ranked, Stage, Status, Trial
from autoflash.variant import Variant

LEAST_BAND = 0.01
"""Times closer than this are one time, however steady the clocks were."""

# Beyond this, what a wide band gives away costs more than agreement between machines is worth.
_WIDEST_BAND = 0.05
_MOST_CHOICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finalist:
    """A trial whose time may be compared with those of the same run."""

    trial: Trial
    measurement: Measurement

    @property
    def median_us(self) -> float:
        """Its time in the run."""
        return self.measurement.median_us

    def ranked(self) -> Ranked:
        """The entry that a decision stores of it."""
        verification = self.trial.verification
        return Ranked(
            variant=self.trial.variant,
            source_digest=self.trial.source_digest,
            trial_id=self.trial.id,
            median_us=self.median_us,
            worst_ratio=verification.worst_ratio if verification is not None else 0.0,
            resources=self.trial.resources,
        )


def decide(
    cell: Cell,
    environment: Environment,
    trials: Sequence[Trial],
    vendor: Sequence[Trial],
    *,
    neighbours: Sequence[Decision] = (),
    quarantined: Collection[int] = (),
    defaults: Collection[Variant] | None = None,
) -> Decision | None:
    """Choose the variants that dispatch uses for a cell.

    Only kernels that passed the full verification grid and were timed in one interleaved run are compared. Among
    those within the noise band of the fastest, and no slower than the default of the same run, the choice is
    canonical: who already wins neighbouring cells, then less shared memory, fewer registers, then the digest.

    Args:
        cell: What is decided.
        environment: Where it is decided.
        trials: Of generated kernels, in any order. Those of other cells or environments are ignored.
        vendor: Of vendor kernels; the fastest of the same run is stored beside the choices.
        neighbours: Decisions of other cells, for the canonical choice; distant ones are ignored.
        quarantined: Ids of trials that failed in use.
        defaults: The variants that a winner has to beat; None asks the catalog.

    Returns:
        The decision, or None where no run has a finalist.
    """
    finalists = _finalists(cell, environment, trials, quarantined)
    if not finalists:
        return None
    defaults = _catalog_defaults(cell, environment, trials) if defaults is None else defaults
    run = _chosen_run(finalists, defaults)
    compared = [finalist for finalist in finalists if finalist.measurement.run == run]
    default = min((f for f in compared if f.trial.variant in defaults), key=_speed, default=None)
    fastest = min(compared, key=_speed)
    band = _noise_band(fastest)
    equals = [
        finalist
        for finalist in compared
        if finalist.median_us <= fastest.median_us * (1.0 + band)
        and (default is None or finalist.median_us <= default.median_us)
    ]
    wins = _neighbouring_wins(cell, neighbours)
    winner = min(equals, key=lambda finalist: _canonical(finalist, wins))
    vendors = [
        finalist for finalist in _finalists(cell, environment, vendor, quarantined) if finalist.measurement.run == run
    ]
    best_vendor = min(vendors, key=_speed, default=None)
    return Decision(
        cell=cell,
        environment=environment,
        choices=tuple(finalist.ranked() for finalist in _ranking(winner, compared)),
        vendor=best_vendor.ranked() if best_vendor is not None else None,
        reason=_reason(winner, fastest, default, compared, equals, band, wins),
        decided_at=max(finalist.measurement.taken_at for finalist in compared),
    )


def _finalists(
    cell: Cell, environment: Environment, trials: Iterable[Trial], quarantined: Collection[int]
) -> list[_Finalist]:
    return [
        _Finalist(trial=trial, measurement=trial.measurement)
        for trial in trials
        if trial.status is Status.CORRECT
        and trial.measurement is not None
        and trial.measurement.stage is Stage.FINAL
        and trial.level is Level.FULL
        and trial.cell == cell
        and trial.environment.mismatch(environment, trial.variant.family) is None
        and (trial.id is None or trial.id not in quarantined)
    ]


def _catalog_defaults(cell: Cell, environment: Environment, trials: Sequence[Trial]) -> set[Variant]:
    device = Device(
        kind=DeviceKind(environment.device_kind),
        name=environment.device_name,
        arch=environment.arch,
        multiprocessors=environment.multiprocessors,
        shared_bytes=environment.shared_bytes,
    )
    return {catalog.search_space(cell, device, family).default() for family in {t.variant.family for t in trials}}


def _chosen_run(finalists: Sequence[_Finalist], defaults: Collection[Variant]) -> str:
    """The latest run, of those in which a default was timed where there are any."""
    with_default = [finalist for finalist in finalists if finalist.trial.variant in defaults]
    latest = max(with_default or finalists, key=lambda f: (f.measurement.taken_at, f.measurement.run))
    return latest.measurement.run


def _speed(finalist: _Finalist) -> tuple[float, str]:
    return (finalist.median_us, finalist.trial.variant.key)


def _noise_band(fastest: _Finalist) -> float:
    measurement = fastest.measurement
    spread = (measurement.p80_us - measurement.p20_us) / 2.0 / measurement.median_us
    return min(max(LEAST_BAND, spread), _WIDEST_BAND)


def is_neighbour(cell: Cell, other: Cell) -> bool:
    """Whether a cell differs from another by at most one bucket of each length, one of the window, one class."""
    classes = list(type(cell.parallelism))
    return (
        (cell.op, cell.dtype, cell.head_dim, cell.head_dim_v, cell.mask, cell.features)
        == (other.op, other.dtype, other.head_dim, other.head_dim_v, other.mask, other.features)
        and (cell.score_mod, cell.mask_mod) == (other.score_mod, other.mask_mod)
        and (cell.deterministic, cell.tf32, cell.group) == (other.deterministic, other.tf32, other.group)
        and abs(cell.q_bucket - other.q_bucket) <= 1
        and abs(cell.k_bucket - other.k_bucket) <= 1
        and bool(cell.window_bucket) == bool(other.window_bucket)
        and abs(cell.window_bucket - other.window_bucket) <= 1
        and abs(classes.index(cell.parallelism) - classes.index(other.parallelism)) <= 1
        and cell != other
    )


def _neighbouring_wins(cell: Cell, neighbours: Sequence[Decision]) -> dict[Variant, int]:
    wins: dict[Variant, int] = {}
    for decision in neighbours:
        if decision.choices and is_neighbour(cell, decision.cell):
            variant = decision.choices[0].variant
            wins[variant] = wins.get(variant, 0) + 1
    return wins


def _canonical(finalist: _Finalist, wins: dict[Variant, int]) -> tuple[int, int, int, str, str]:
    trial = finalist.trial
    resources = trial.resources
    return (
        -wins.get(trial.variant, 0),
        resources.shared_bytes if resources is not None else 0,
        resources.registers if resources is not None else 0,
        trial.source_digest,
        trial.variant.key,
    )


def _ranking(winner: _Finalist, compared: Sequence[_Finalist]) -> list[_Finalist]:
    """The winner, the next fastest, and at the end one that runs with any strides and alignment."""
    rest = sorted((finalist for finalist in compared if finalist is not winner), key=_speed)
    ranking = [winner, *rest[: _MOST_CHOICES - 1]]
    if catalog.has_precondition(ranking[-1].trial.variant):
        free = [finalist for finalist in [winner, *rest] if not catalog.has_precondition(finalist.trial.variant)]
        if free:
            ranking = [finalist for finalist in ranking if finalist is not free[0]][: _MOST_CHOICES - 1] + free[:1]
    return ranking


def _reason(
    winner: _Finalist,
    fastest: _Finalist,
    default: _Finalist | None,
    compared: Sequence[_Finalist],
    equals: Sequence[_Finalist],
    band: float,
    wins: dict[Variant, int],
) -> str:
    finalists = f"{len(compared)} finalist{'s' if len(compared) > 1 else ''}"
    if winner is default:
        text = f"the default: none of {finalists} is clearly faster" if len(compared) > 1 else "the default alone"
    elif winner is fastest:
        text = f"fastest of {finalists}"
    else:
        text = f"within {band:.1%} of the fastest of {finalists}"
    if len(equals) > 1:
        why = "wins neighbouring cells" if wins.get(winner.trial.variant) else "needs the least of the machine"
        text += f"; of {len(equals)} within the noise band of {band:.1%} it {why}"
    if default is None:
        return text + "; no default was timed in this run"
    if winner is not default:
        text += f"; {default.median_us / winner.median_us:.2f}x the speed of the default"
    return text
