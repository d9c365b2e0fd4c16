"""Nouns to rows and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from autoflash import keys
from autoflash.db.schema import (
    LONGEST_US,
    Base,
    CellRow,
    EnvironmentRow,
    MeasurementRow,
    RankedRow,
    Role,
    SoftwareRow,
    TrialRow,
    VariantRow,
    VerificationRow,
)
from autoflash.problem import Cell, features_of, features_text
from autoflash.trial import Environment, Measurement, Ranked, Resources, Verification
from autoflash.variant import Choices, Variant

RowT = TypeVar("RowT", bound=Base)

_LONGEST_TEXT = 8000


def clean_text(text: str) -> str:
    """Text that every database stores: valid Unicode, no NUL, and not a megabyte of compiler output."""
    text = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[...]\n{text[-half:]}"


def checked_us(name: str, value: float) -> float:
    """A time that may be stored.

    Raises:
        ValueError: for what is not a positive, finite number.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0.0 < number < LONGEST_US:
        raise ValueError(f"{name} must be a positive and finite number of microseconds, got {value!r}")
    return number


def _find_or_add(session: Session, table: type[RowT], condition: ColumnElement[bool], make: Callable[[], RowT]) -> RowT:
    row = session.scalars(select(table).where(condition)).one_or_none()
    if row is None:
        row = make()
        session.add(row)
        session.flush()
    return row


def find_or_add_cell(session: Session, cell: Cell) -> CellRow:
    """The row of a cell."""
    return _find_or_add(
        session,
        CellRow,
        CellRow.key == cell.key,
        lambda: CellRow(
            key=cell.key,
            op=cell.op,
            dtype=cell.dtype,
            head_dim=cell.head_dim,
            head_dim_v=cell.head_dim_v,
            group_size=cell.group,
            mask=cell.mask,
            deterministic=cell.deterministic,
            tf32=cell.tf32,
            q_bucket=cell.q_bucket,
            k_bucket=cell.k_bucket,
            parallelism=cell.parallelism,
            features=features_text(cell.features),
            window_bucket=cell.window_bucket,
            score_mod=cell.score_mod or None,
            mask_mod=cell.mask_mod or None,
        ),
    )


def find_or_add_variant(session: Session, variant: Variant) -> VariantRow:
    """The row of a variant."""
    return _find_or_add(
        session,
        VariantRow,
        VariantRow.key == variant.key,
        lambda: VariantRow(
            key=variant.key,
            family=variant.family,
            structure=keys.canonical_json(dict(variant.structure)),
            config=keys.canonical_json(dict(variant.config)),
        ),
    )


def find_or_add_environment(session: Session, environment: Environment) -> EnvironmentRow:
    """The row of the fields that must match."""
    return _find_or_add(
        session,
        EnvironmentRow,
        EnvironmentRow.key == environment.key,
        lambda: EnvironmentRow(key=environment.key, **environment.identity()),
    )


def find_or_add_software(session: Session, environment: Environment) -> SoftwareRow:
    """The row of the versions that are only noted."""
    torch, driver, cuda = environment.torch, environment.driver, environment.cuda
    return _find_or_add(
        session,
        SoftwareRow,
        and_(SoftwareRow.torch == torch, SoftwareRow.driver == driver, SoftwareRow.cuda == cuda),
        lambda: SoftwareRow(torch=torch, driver=driver, cuda=cuda),
    )


def measurement_row(trial_id: int, measurement: Measurement) -> MeasurementRow:
    """A row for a timing.

    Raises:
        ValueError: for a time that is not positive and finite, or for no samples.
    """
    if measurement.samples < 1:
        raise ValueError(f"a measurement has at least one sample, got {measurement.samples}")
    return MeasurementRow(
        trial_id=trial_id,
        stage=measurement.stage,
        run=measurement.run,
        median_us=checked_us("median_us", measurement.median_us),
        p20_us=checked_us("p20_us", measurement.p20_us),
        p80_us=checked_us("p80_us", measurement.p80_us),
        samples=int(measurement.samples),
        policy=measurement.policy,
        sm_clock_mhz=int(measurement.sm_clock_mhz),
        temperature_c=int(measurement.temperature_c),
        power_w=float(measurement.power_w) if math.isfinite(measurement.power_w) else 0.0,
        throttled=clean_text(measurement.throttled),
        taken_at=measurement.taken_at,
    )


def verification_row(
    source_digest: str,
    variant_id: int,
    environment_id: int,
    cell: Cell,
    verification: Verification,
    trial_id: int | None = None,
) -> VerificationRow:
    """A row for an outcome of the gate.

    Raises:
        ValueError: for one that passed with a ratio that is not a finite number.
    """
    ratio = float(verification.worst_ratio)
    if verification.passed and not 0.0 <= ratio < math.inf:
        raise ValueError(f"a passed verification has a finite worst_ratio, got {verification.worst_ratio!r}")
    return VerificationRow(
        trial_id=trial_id,
        source_digest=source_digest,
        variant_id=variant_id,
        environment_id=environment_id,
        op=cell.op,
        dtype=cell.dtype,
        head_dim=cell.head_dim,
        head_dim_v=cell.head_dim_v,
        mask=cell.mask,
        tf32=cell.tf32,
        level=verification.level,
        passed=bool(verification.passed),
        worst_ratio=ratio if math.isfinite(ratio) else None,
        detail=clean_text(verification.detail),
        checks=int(verification.checks),
        features=features_text(cell.features),
    )


def ranked_row(decision_id: int, role: Role, position: int, variant_id: int, ranked: Ranked) -> RankedRow:
    """A row for one entry of a decision.

    Raises:
        ValueError: for a time or a ratio that is not finite.
    """
    if not 0.0 <= ranked.worst_ratio < math.inf:
        raise ValueError(f"a ranked variant has a finite worst_ratio, got {ranked.worst_ratio!r}")
    resources = ranked.resources
    return RankedRow(
        decision_id=decision_id,
        role=role,
        position=position,
        variant_id=variant_id,
        source_digest=ranked.source_digest,
        trial_id=ranked.trial_id,
        median_us=checked_us("median_us", ranked.median_us),
        worst_ratio=float(ranked.worst_ratio),
        shared_bytes=None if resources is None else resources.shared_bytes,
        registers=None if resources is None else resources.registers,
        spill_bytes=None if resources is None else resources.spill_bytes,
    )


def cell_of(row: CellRow) -> Cell:
    """The noun of a row."""
    return Cell(
        op=row.op,
        dtype=row.dtype,
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        group=row.group_size,
        mask=row.mask,
        deterministic=row.deterministic,
        tf32=row.tf32,
        q_bucket=row.q_bucket,
        k_bucket=row.k_bucket,
        parallelism=row.parallelism,
        features=features_of(row.features),
        window_bucket=row.window_bucket,
        score_mod=row.score_mod or "",
        mask_mod=row.mask_mod or "",
    )


def variant_of(row: VariantRow) -> Variant:
    """The noun of a row."""
    return Variant(
        family=row.family,
        structure=Choices(json.loads(row.structure)),
        config=Choices(json.loads(row.config)),
    )


def environment_of(row: EnvironmentRow, software: SoftwareRow) -> Environment:
    """The noun of two rows."""
    return Environment(
        device_kind=row.device_kind,
        device_name=row.device_name,
        arch=row.arch,
        multiprocessors=row.multiprocessors,
        shared_bytes=row.shared_bytes,
        triton=row.triton,
        torch=software.torch,
        driver=software.driver,
        cuda=software.cuda,
    )


def resources_of(row: TrialRow | RankedRow) -> Resources | None:
    """What the compiler said, if anything was compiled."""
    if row.shared_bytes is None or row.registers is None or row.spill_bytes is None:
        return None
    return Resources(shared_bytes=row.shared_bytes, registers=row.registers, spill_bytes=row.spill_bytes)


def measurement_of(row: MeasurementRow) -> Measurement:
    """The noun of a row."""
    return Measurement(
        stage=row.stage,
        run=row.run,
        median_us=row.median_us,
        p20_us=row.p20_us,
        p80_us=row.p80_us,
        samples=row.samples,
        policy=row.policy,
        sm_clock_mhz=row.sm_clock_mhz,
        temperature_c=row.temperature_c,
        power_w=row.power_w,
        throttled=row.throttled,
        taken_at=row.taken_at,
    )


def verification_of(row: VerificationRow) -> Verification:
    """The noun of a row."""
    return Verification(
        level=row.level,
        passed=row.passed,
        worst_ratio=math.inf if row.worst_ratio is None else row.worst_ratio,
        detail=row.detail,
        checks=row.checks,
    )


def ranked_of(row: RankedRow, variant: Variant) -> Ranked:
    """The noun of a row."""
    return Ranked(
        variant=variant,
        source_digest=row.source_digest,
        trial_id=row.trial_id,
        median_us=row.median_us,
        worst_ratio=row.worst_ratio,
        resources=resources_of(row),
    )
