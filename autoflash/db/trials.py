"""Trials, measurements and verifications: what was tried, and what came of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone

from sqlalchemy import ColumnElement, FromClause, func, select
from sqlalchemy.orm import Session, join

from autoflash.db import rows
from autoflash.db.schema import (
    CellRow,
    EnvironmentRow,
    MeasurementRow,
    QuarantineRow,
    SoftwareRow,
    TrialRow,
    VariantRow,
    VerificationRow,
)
from autoflash.problem import Cell, features_text
from autoflash.trial import Environment, Level, Measurement, Status, Trial, Verification
from autoflash.variant import Family, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFilter:
    """Which trials to look at; None means all.

    Attributes:
        cell, environment, family, status: As recorded; an environment matches by its key.
        trial_id: One trial.
        quarantined: Look at those too that were marked as bad.
    """

    cell: Cell | None = None
    environment: Environment | None = None
    family: Family | None = None
    status: Status | None = None
    trial_id: int | None = None
    quarantined: bool = False

    def conditions(self) -> list[ColumnElement[bool]]:
        """For a query that joins trial, cell, variant and environment."""
        found: list[ColumnElement[bool]] = []
        if self.cell is not None:
            found.append(CellRow.key == self.cell.key)
        if self.environment is not None:
            found.append(EnvironmentRow.key == self.environment.key)
        if self.family is not None:
            found.append(VariantRow.family == self.family)
        if self.status is not None:
            found.append(TrialRow.status == self.status)
        if self.trial_id is not None:
            found.append(TrialRow.id == self.trial_id)
        if not self.quarantined:
            found.append(TrialRow.id.not_in(select(QuarantineRow.trial_id)))
        return found


def joined() -> FromClause:
    """Trials with their cells, variants and environments, as a filter's conditions need them."""
    with_cells = join(TrialRow, CellRow, CellRow.id == TrialRow.cell_id)
    with_variants = join(with_cells, VariantRow, VariantRow.id == TrialRow.variant_id)
    return join(with_variants, EnvironmentRow, EnvironmentRow.id == TrialRow.environment_id)


def now_utc() -> str:
    """UTC time, ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def check(trial: Trial) -> None:
    """Refuse what must not enter the database, before it is touched.

    Raises:
        ValueError: for a time or a ratio that is no number.
    """
    if trial.measurement is not None:
        rows.measurement_row(0, trial.measurement)
    if trial.verification is not None:
        rows.verification_row(trial.source_digest, 0, 0, trial.cell, trial.verification)


def record(session: Session, trial: Trial) -> int:
    """Insert a finished trial, unless there is one of the same cell, variant, environment and source.

    Returns:
        Id of the trial's row, or of the one that was there and is not quarantined.
    """
    cell_id = rows.find_or_add_cell(session, trial.cell).id
    variant_id = rows.find_or_add_variant(session, trial.variant).id
    environment_id = rows.find_or_add_environment(session, trial.environment).id
    last = session.scalars(
        select(TrialRow)
        .where(
            TrialRow.cell_id == cell_id,
            TrialRow.variant_id == variant_id,
            TrialRow.environment_id == environment_id,
            TrialRow.source_digest == trial.source_digest,
        )
        .order_by(TrialRow.attempt.desc())
        .limit(1)
    ).first()
    if last is not None and session.get(QuarantineRow, last.id) is None:
        return last.id
    resources = trial.resources
    row = TrialRow(
        cell_id=cell_id,
        variant_id=variant_id,
        environment_id=environment_id,
        software_id=rows.find_or_add_software(session, trial.environment).id,
        source_digest=trial.source_digest,
        attempt=1 if last is None else last.attempt + 1,
        status=trial.status,
        detail=rows.clean_text(trial.detail),
        shared_bytes=None if resources is None else int(resources.shared_bytes),
        registers=None if resources is None else int(resources.registers),
        spill_bytes=None if resources is None else int(resources.spill_bytes),
        seed=None if trial.seed is None else int(trial.seed),
        recorded_at=now_utc(),
    )
    session.add(row)
    session.flush()
    if trial.measurement is not None:
        session.add(rows.measurement_row(row.id, trial.measurement))
    if trial.verification is not None:
        session.add(
            rows.verification_row(
                trial.source_digest, variant_id, environment_id, trial.cell, trial.verification, row.id
            )
        )
    session.flush()
    return row.id


def load(session: Session, wanted: TrialFilter) -> list[Trial]:
    """Trials in the order of their ids, with their latest timing and the verification that governs them."""
    conditions = wanted.conditions()
    query = (
        select(TrialRow, CellRow, VariantRow, EnvironmentRow, SoftwareRow)
        .select_from(joined())
        .join(SoftwareRow, SoftwareRow.id == TrialRow.software_id)
        .where(*conditions)
        .order_by(TrialRow.id)
    )
    found = session.execute(query).all()
    if not found:
        return []
    measurements = _latest_measurements(session, conditions)
    verifications = _Verifications(session, wanted)
    trials = []
    for trial, cell_row, variant, environment, software in found:
        cell = rows.cell_of(cell_row)
        measurement = measurements.get(trial.id)
        trials.append(
            Trial(
                cell=cell,
                variant=rows.variant_of(variant),
                environment=rows.environment_of(environment, software),
                source_digest=trial.source_digest,
                status=trial.status,
                detail=trial.detail,
                resources=rows.resources_of(trial),
                verification=verifications.of_trial(trial, cell),
                measurement=measurement,
                seed=trial.seed,
                id=trial.id,
            )
        )
    return trials


def _latest_measurements(session: Session, conditions: list[ColumnElement[bool]]) -> dict[int, Measurement]:
    """Timing by trial."""
    latest = (
        select(func.max(MeasurementRow.id))
        .select_from(joined())
        .join(MeasurementRow, MeasurementRow.trial_id == TrialRow.id)
        .where(*conditions)
        .group_by(MeasurementRow.trial_id)
    )
    found = session.scalars(select(MeasurementRow).where(MeasurementRow.id.in_(latest)))
    return {row.trial_id: rows.measurement_of(row) for row in found}


_Kernel = tuple[str, int, int, str, str, int, int, str, bool, str]


class _Verifications:
    """Outcomes of the gate by kernel: source, variant, environment and form."""

    def __init__(self, session: Session, wanted: TrialFilter) -> None:
        query = select(VerificationRow).order_by(VerificationRow.id)
        if wanted.environment is not None:
            query = query.join(EnvironmentRow, EnvironmentRow.id == VerificationRow.environment_id).where(
                EnvironmentRow.key == wanted.environment.key
            )
        if wanted.cell is not None:
            query = query.where(*_form_conditions(wanted.cell))
        if wanted.trial_id is not None:
            variant = select(TrialRow.variant_id).where(TrialRow.id == wanted.trial_id).scalar_subquery()
            query = query.where(VerificationRow.variant_id == variant)
        distrusted = set(session.scalars(select(QuarantineRow.trial_id)))
        self._own: dict[int, Verification] = {}
        self._shared: dict[_Kernel, list[Verification]] = defaultdict(list)
        for row in session.scalars(query):
            verification = rows.verification_of(row)
            if row.trial_id is not None:
                self._own[row.trial_id] = verification
            if row.trial_id not in distrusted:
                self._shared[
                    row.source_digest,
                    row.variant_id,
                    row.environment_id,
                    row.op.value,
                    row.dtype.value,
                    row.head_dim,
                    row.head_dim_v,
                    row.mask.value,
                    row.tf32,
                    row.features,
                ].append(verification)

    def of_trial(self, trial: TrialRow, cell: Cell) -> Verification | None:
        """What governs a correct trial is shared; a failed one keeps what it failed by."""
        if trial.status is not Status.CORRECT:
            return self._own.get(trial.id)
        return governing(
            self._shared[
                trial.source_digest,
                trial.variant_id,
                trial.environment_id,
                cell.op.value,
                cell.dtype.value,
                cell.head_dim,
                cell.head_dim_v,
                cell.mask.value,
                cell.tf32,
                features_text(cell.features),
            ]
        )


def _form_conditions(cell: Cell) -> list[ColumnElement[bool]]:
    return [
        VerificationRow.op == cell.op,
        VerificationRow.dtype == cell.dtype,
        VerificationRow.head_dim == cell.head_dim,
        VerificationRow.head_dim_v == cell.head_dim_v,
        VerificationRow.mask == cell.mask,
        VerificationRow.tf32 == cell.tf32,
        VerificationRow.features == features_text(cell.features),
    ]


def governing(outcomes: Iterable[Verification]) -> Verification | None:
    """Which of several outcomes of one kernel counts; oldest first.

    A failure, at whatever size it was seen, holds until a later full verification passes. Else the highest level does.
    """
    best: Verification | None = None
    for outcome in outcomes:
        clears = outcome.passed and outcome.level is Level.FULL
        if best is None or not outcome.passed or clears or (best.passed and outcome.level >= best.level):
            best = outcome
    return best


def load_verification(
    session: Session, source_digest: str, variant: Variant, cell: Cell, environment: Environment
) -> Verification | None:
    """The outcome that governs a kernel; None where it was never compared."""
    query = (
        select(VerificationRow)
        .join(VariantRow, VariantRow.id == VerificationRow.variant_id)
        .join(EnvironmentRow, EnvironmentRow.id == VerificationRow.environment_id)
        .where(
            VerificationRow.source_digest == source_digest,
            VariantRow.key == variant.key,
            EnvironmentRow.key == environment.key,
            *_form_conditions(cell),
        )
        .order_by(VerificationRow.id)
    )
    distrusted = set(session.scalars(select(QuarantineRow.trial_id)))
    found = [row for row in session.scalars(query) if row.trial_id not in distrusted]
    return governing(rows.verification_of(row) for row in found)
