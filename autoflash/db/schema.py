"""Tables of the tuning database. Trials and decisions are appended, never changed; only claims come and go.

Rows have surrogate ids from the database and, where a noun has an identity, its key from ``keys.py``.
A change here needs a migration beside it (``db/migrations``) and an old file in the tests that it upgrades.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Double,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autoflash.problem import DType, Mask, Parallelism, Pass
from autoflash.trial import Level, Stage, Status
from autoflash.variant import Family

KEY_LENGTH = 16
LONGEST_US = 1e12
"""Upper bound of a stored time; keeps infinity out on databases whose floats have it."""


class Role(str, Enum):
    """What an entry of a decision is: a generated kernel in its rank, or the vendor kernel beside them."""

    CHOICE = "choice"
    VENDOR = "vendor"


def _values(members: type[Enum]) -> list[str]:
    return [str(member.value) for member in members]


def _names(members: type[Enum]) -> list[str]:
    return [member.name.lower() for member in members]


def _enum(members: type[Enum], name: str) -> EnumType:
    """Text that holds a member's value (an integer member's name), with a CHECK constraint of the given name."""
    return EnumType(
        members,
        name=name,
        native_enum=False,
        create_constraint=True,
        length=32,
        values_callable=_names if issubclass(members, int) else _values,
    )


class Base(DeclarativeBase):
    """Declarative base; constraint names are fixed so that migrations can name them."""

    type_annotation_map: ClassVar = {float: Double}
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class CellRow(Base):
    """What was to be computed. ``features`` are named as in a cell's JSON; empty for plain attention.

    Expressions are lines as they are in a cell's JSON; NULL for none.
    """

    __tablename__ = "cell"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    op: Mapped[Pass] = mapped_column(_enum(Pass, "op"))
    dtype: Mapped[DType] = mapped_column(_enum(DType, "dtype"))
    head_dim: Mapped[int]
    head_dim_v: Mapped[int]
    group_size: Mapped[int]
    mask: Mapped[Mask] = mapped_column(_enum(Mask, "mask"))
    deterministic: Mapped[bool]
    tf32: Mapped[bool]
    q_bucket: Mapped[int]
    k_bucket: Mapped[int]
    parallelism: Mapped[Parallelism] = mapped_column(_enum(Parallelism, "parallelism"))
    features: Mapped[str] = mapped_column(Text, server_default="")
    window_bucket: Mapped[int] = mapped_column(server_default=text("0"))
    score_mod: Mapped[str | None] = mapped_column(Text)
    mask_mod: Mapped[str | None] = mapped_column(Text)


class VariantRow(Base):
    """How it was computed. Knobs differ between families, so choices are canonical JSON."""

    __tablename__ = "variant"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    family: Mapped[Family] = mapped_column(_enum(Family, "family"))
    structure: Mapped[str] = mapped_column(Text)
    config: Mapped[str] = mapped_column(Text)


class EnvironmentRow(Base):
    """Where results hold: the fields that must match."""

    __tablename__ = "environment"

    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(KEY_LENGTH), unique=True)
    device_kind: Mapped[str] = mapped_column(String(16))
    device_name: Mapped[str] = mapped_column(Text)
    arch: Mapped[str] = mapped_column(String(32))
    multiprocessors: Mapped[int]
    shared_bytes: Mapped[int]
    triton: Mapped[str] = mapped_column(String(32))


class SoftwareRow(Base):
    """Versions that are noted with a result and never compared."""

    __tablename__ = "software"
    __table_args__ = (UniqueConstraint("torch", "driver", "cuda"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    torch: Mapped[str] = mapped_column(String(64))
    driver: Mapped[str] = mapped_column(String(64))
    cuda: Mapped[str] = mapped_column(String(64))


class TrialRow(Base):
    """One variant tried on one cell, inserted when finished.

    ``attempt`` is 1; a further attempt is possible only after the one before was quarantined.
    """

    __tablename__ = "trial"
    __table_args__ = (
        UniqueConstraint(
            "cell_id", "variant_id", "environment_id", "source_digest", "attempt", name="uq_trial_attempt"
        ),
        CheckConstraint("attempt >= 1", name="attempt"),
        Index(None, "environment_id", "cell_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[int] = mapped_column(ForeignKey("cell.id"))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    software_id: Mapped[int] = mapped_column(ForeignKey("software.id"))
    source_digest: Mapped[str] = mapped_column(String(KEY_LENGTH))
    attempt: Mapped[int]
    status: Mapped[Status] = mapped_column(_enum(Status, "status"))
    detail: Mapped[str] = mapped_column(Text)
    shared_bytes: Mapped[int | None]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]
    seed: Mapped[int | None] = mapped_column(BigInteger)
    recorded_at: Mapped[str] = mapped_column(String(40))


class MeasurementRow(Base):
    """One timing of a correct trial."""

    __tablename__ = "measurement"
    __table_args__ = (
        CheckConstraint(f"median_us > 0 AND median_us < {LONGEST_US:.0f}", name="median_us"),
        CheckConstraint(f"p20_us > 0 AND p20_us < {LONGEST_US:.0f}", name="p20_us"),
        CheckConstraint(f"p80_us > 0 AND p80_us < {LONGEST_US:.0f}", name="p80_us"),
        CheckConstraint("samples >= 1", name="samples"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id"), index=True)
    stage: Mapped[Stage] = mapped_column(_enum(Stage, "stage"))
    run: Mapped[str] = mapped_column(String(64))
    median_us: Mapped[float]
    p20_us: Mapped[float]
    p80_us: Mapped[float]
    samples: Mapped[int]
    policy: Mapped[str] = mapped_column(String(64))
    sm_clock_mhz: Mapped[int]
    temperature_c: Mapped[int]
    power_w: Mapped[float]
    throttled: Mapped[str] = mapped_column(Text)
    taken_at: Mapped[str] = mapped_column(String(40))


class VerificationRow(Base):
    """One outcome of the correctness gate.

    It belongs to a kernel of one form, not to a cell: all size buckets and degrees of parallelism share it.
    ``worst_ratio`` is NULL where it was not finite. ``trial_id`` is the trial that it came with, if any.
    """

    __tablename__ = "verification"
    __table_args__ = (
        CheckConstraint("NOT passed OR worst_ratio IS NOT NULL", name="passed_has_ratio"),
        Index("ix_verification_kernel", "source_digest", "variant_id", "environment_id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"), index=True)
    source_digest: Mapped[str] = mapped_column(String(KEY_LENGTH))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    op: Mapped[Pass] = mapped_column(_enum(Pass, "op"))
    dtype: Mapped[DType] = mapped_column(_enum(DType, "dtype"))
    head_dim: Mapped[int]
    head_dim_v: Mapped[int]
    mask: Mapped[Mask] = mapped_column(_enum(Mask, "mask"))
    tf32: Mapped[bool]
    level: Mapped[Level] = mapped_column(_enum(Level, "level"))
    passed: Mapped[bool]
    worst_ratio: Mapped[float | None]
    detail: Mapped[str] = mapped_column(Text)
    checks: Mapped[int]
    features: Mapped[str] = mapped_column(Text, server_default="")


class DecisionRow(Base):
    """What dispatch uses for a cell; the latest one of a cell and environment counts."""

    __tablename__ = "decision"
    __table_args__ = (Index(None, "environment_id", "cell_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[int] = mapped_column(ForeignKey("cell.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    software_id: Mapped[int] = mapped_column(ForeignKey("software.id"))
    reason: Mapped[str] = mapped_column(Text)
    decided_at: Mapped[str] = mapped_column(String(40))


class RankedRow(Base):
    """One entry of a decision."""

    __tablename__ = "ranked"
    __table_args__ = (
        UniqueConstraint("decision_id", "role", "position"),
        CheckConstraint(f"median_us > 0 AND median_us < {LONGEST_US:.0f}", name="median_us"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    decision_id: Mapped[int] = mapped_column(ForeignKey("decision.id"))
    role: Mapped[Role] = mapped_column(_enum(Role, "role"))
    position: Mapped[int]
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    source_digest: Mapped[str] = mapped_column(String(KEY_LENGTH))
    trial_id: Mapped[int | None] = mapped_column(ForeignKey("trial.id"))
    median_us: Mapped[float]
    worst_ratio: Mapped[float]
    shared_bytes: Mapped[int | None]
    registers: Mapped[int | None]
    spill_bytes: Mapped[int | None]


class ClaimRow(Base):
    """A trial that a live process is working on. Deleted when done; taken over when expired or its process is gone."""

    __tablename__ = "claim"
    __table_args__ = (UniqueConstraint("cell_id", "variant_id", "environment_id", name="uq_claim_triple"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    cell_id: Mapped[int] = mapped_column(ForeignKey("cell.id"))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variant.id"))
    environment_id: Mapped[int] = mapped_column(ForeignKey("environment.id"))
    token: Mapped[str] = mapped_column(String(32))
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    started: Mapped[int] = mapped_column(BigInteger)
    heartbeat: Mapped[float]
    expires: Mapped[float]


class QuarantineRow(Base):
    """A trial whose record turned out bad: kept, and looked at by nothing that chooses."""

    __tablename__ = "quarantine"

    trial_id: Mapped[int] = mapped_column(ForeignKey("trial.id"), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    marked_at: Mapped[str] = mapped_column(String(40))
