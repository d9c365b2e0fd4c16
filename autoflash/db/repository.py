"""The one door to the tuning database: nouns in, nouns out.

Each method is one short transaction. A repository may be used from several threads and after a fork.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from autoflash.db import claim, decisions, rows, trials
from autoflash.db.claim import Claim
from autoflash.db.location import Location
from autoflash.db.schema import (
    CellRow,
    DecisionRow,
    EnvironmentRow,
    MeasurementRow,
    QuarantineRow,
    SoftwareRow,
    TrialRow,
    VariantRow,
)
from autoflash.db.session import Database
from autoflash.db.trials import TrialFilter
from autoflash.problem import Cell
from autoflash.trial import Decision, Environment, Measurement, Status, Trial, Verification
from autoflash.variant import Family, Variant


class Repository:
    """An open tuning database. All methods raise DatabaseError, naming the place, when it fails or stays locked."""

    def __init__(self, database: Database) -> None:
        """Use :meth:`open`."""
        self._database = database

    @classmethod
    def open(cls, url: str | None = None, *, read_only: bool = False) -> Repository:
        """Open a database, creating or upgrading it unless read-only.

        Args:
            url: Path of a SQLite file or a SQLAlchemy URL; None for ``AUTOFLASH_DB`` or the default place.
            read_only: Write nothing, not even a lock. Of a file in use by writers it may show the state at opening.

        Raises:
            DatabaseError: naming the place and what to do about it.
        """
        return cls(Database.open(Location.of(url), read_only=read_only))

    @staticmethod
    def exists(url: str | None = None) -> bool:
        """Whether there is something to open read-only, a folder included; True for a server, which is not asked."""
        location = Location.of(url)
        return location.file is None or location.file.exists()

    @property
    def location(self) -> str:
        """Path or URL, without a password."""
        return str(self._database.location)

    @property
    def read_only(self) -> bool:
        """Whether it was opened for reading."""
        return self._database.read_only

    def close(self) -> None:
        """Let go. The last writer leaves one file that can be copied and read alone."""
        self._database.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def record(self, trial: Trial) -> Trial:
        """Record a finished trial.

        Returns:
            The trial with its id; where this cell, variant, environment and source were recorded before, that trial.

        Raises:
            ValueError: for a time that is not positive and finite; nothing is written.
        """
        trials.check(trial)

        def work(session: Session) -> Trial:
            trial_id = trials.record(session, trial)
            return trials.load(session, TrialFilter(trial_id=trial_id))[0]

        return self._database.write(work)

    def add_measurement(self, trial_id: int, measurement: Measurement) -> None:
        """Append a timing to a correct trial.

        Raises:
            ValueError: for a bad time, or a trial that is absent or not correct; nothing is written.
        """
        row = rows.measurement_row(trial_id, measurement)

        def work(session: Session) -> None:
            trial = _get_trial(session, trial_id)
            if trial.status is not Status.CORRECT:
                raise ValueError(f"trial {trial_id} has status {trial.status.value}; only a correct one is measured")
            session.add(rows.measurement_row(row.trial_id, measurement))

        self._database.write(work)

    def measurements(self, trial_id: int) -> list[Measurement]:
        """All timings of a trial, oldest first."""

        def work(session: Session) -> list[Measurement]:
            query = select(MeasurementRow).where(MeasurementRow.trial_id == trial_id).order_by(MeasurementRow.id)
            return [rows.measurement_of(row) for row in session.scalars(query)]

        return self._database.read(work)

    def add_verification(
        self,
        source_digest: str,
        variant: Variant,
        cell: Cell,
        environment: Environment,
        verification: Verification,
    ) -> None:
        """Append an outcome of the gate, for all cells that the same kernel serves.

        Raises:
            ValueError: for one that passed without a finite ratio; nothing is written.
        """
        rows.verification_row(source_digest, 0, 0, cell, verification)

        def work(session: Session) -> None:
            variant_id = rows.find_or_add_variant(session, variant).id
            environment_id = rows.find_or_add_environment(session, environment).id
            session.add(rows.verification_row(source_digest, variant_id, environment_id, cell, verification))

        self._database.write(work)

    def verification(
        self, source_digest: str, variant: Variant, cell: Cell, environment: Environment
    ) -> Verification | None:
        """The outcome that governs a kernel: a failure until a later full pass, else the highest level."""
        return self._database.read(
            lambda session: trials.load_verification(session, source_digest, variant, cell, environment)
        )

    def trials(
        self,
        *,
        cell: Cell | None = None,
        environment: Environment | None = None,
        family: Family | None = None,
        status: Status | None = None,
        quarantined: bool = False,
    ) -> list[Trial]:
        """Trials by id, each with its latest timing and the verification that governs it.

        Args:
            cell: Only its trials.
            environment: Only where its key matches.
            family: Only variants of it.
            status: Only trials that ended so.
            quarantined: Also those that were marked as bad.
        """
        wanted = TrialFilter(cell=cell, environment=environment, family=family, status=status, quarantined=quarantined)
        return self._database.read(lambda session: trials.load(session, wanted))

    def trial(self, trial_id: int) -> Trial | None:
        """One trial, quarantined or not; None where there is none."""

        def work(session: Session) -> Trial | None:
            if session.get(TrialRow, trial_id) is None:
                return None
            return trials.load(session, TrialFilter(trial_id=trial_id, quarantined=True))[0]

        return self._database.read(work)

    def finished(self, cell: Cell, environment: Environment, *, family: Family | None = None) -> int:
        """How many distinct variants have a trial here, whatever its status, that is not quarantined."""

        def work(session: Session) -> int:
            conditions = TrialFilter(cell=cell, environment=environment, family=family).conditions()
            query = select(func.count(TrialRow.variant_id.distinct())).select_from(trials.joined()).where(*conditions)
            return session.scalar(query) or 0

        return self._database.read(work)

    def counts(self, *, cell: Cell | None = None, environment: Environment | None = None) -> dict[Status, int]:
        """Trials by status, without quarantined ones."""

        def work(session: Session) -> dict[Status, int]:
            conditions = TrialFilter(cell=cell, environment=environment).conditions()
            query = select(TrialRow.status, func.count(TrialRow.id)).select_from(trials.joined()).where(*conditions)
            found = {row[0]: row[1] for row in session.execute(query.group_by(TrialRow.status))}
            return {status: found[status] for status in Status if status in found}

        return self._database.read(work)

    def cells(self, environment: Environment | None = None) -> list[Cell]:
        """Cells that have a trial or a decision, in the order in which they came."""

        def work(session: Session) -> list[Cell]:
            used = [
                select(table.cell_id).join(EnvironmentRow, EnvironmentRow.id == table.environment_id)
                for table in (TrialRow, DecisionRow)
            ]
            if environment is not None:
                used = [query.where(EnvironmentRow.key == environment.key) for query in used]
            query = select(CellRow).where(CellRow.id.in_(used[0].union(used[1]))).order_by(CellRow.id)
            return [rows.cell_of(row) for row in session.scalars(query)]

        return self._database.read(work)

    def environments(self) -> list[Environment]:
        """Environments that have a trial or a decision; several where only noted versions differ."""

        def work(session: Session) -> list[Environment]:
            pairs = select(TrialRow.environment_id, TrialRow.software_id).union(
                select(DecisionRow.environment_id, DecisionRow.software_id)
            )
            used = pairs.subquery()
            query = (
                select(EnvironmentRow, SoftwareRow)
                .join(used, used.c.environment_id == EnvironmentRow.id)
                .join(SoftwareRow, SoftwareRow.id == used.c.software_id)
                .order_by(EnvironmentRow.id, SoftwareRow.id)
            )
            return [rows.environment_of(row, software) for row, software in session.execute(query)]

        return self._database.read(work)

    def claim(
        self,
        cell: Cell,
        variant: Variant,
        environment: Environment,
        *,
        source_digest: str | None = None,
        ttl_s: float = 120.0,
    ) -> Claim | None:
        """Claim a trial for this process.

        Args:
            cell: For which the variant is to be tried.
            variant: What is to be tried.
            environment: Where.
            source_digest: A finished trial counts only if it is of this source; None counts any.
            ttl_s: The claim ends by itself so long after its last heartbeat.

        Returns:
            None where the trial is finished, or a live process has claimed it.
        """
        return claim.take(self._database, cell, variant, environment, source_digest=source_digest, ttl_s=ttl_s)

    def claimed(self, cell: Cell, environment: Environment) -> list[Variant]:
        """Variants that live processes, this one included, are trying on a cell."""

        def work(session: Session) -> list[Variant]:
            wanted = claim.live_variant_ids(session, cell, environment)
            query = select(VariantRow).where(VariantRow.id.in_(wanted)).order_by(VariantRow.key)
            return [rows.variant_of(row) for row in session.scalars(query)]

        return self._database.read(work)

    def save_decision(self, decision: Decision) -> bool:
        """Append a decision; see :meth:`save_decisions`."""
        return self.save_decisions([decision]) == 1

    def save_decisions(self, chosen: Sequence[Decision]) -> int:
        """Append decisions, all or none; those that the database has already are not repeated.

        Returns:
            How many were new.

        Raises:
            ValueError: for a decision for nothing, a bad number or an unknown trial id; nothing is written.
        """
        for decision in chosen:
            decisions.check(decision)

        def work(session: Session) -> int:
            for decision in chosen:
                for ranked in (*decision.choices, *([decision.vendor] if decision.vendor is not None else [])):
                    if ranked.trial_id is not None:
                        _get_trial(session, ranked.trial_id)
            return sum(decisions.save(session, decision) for decision in chosen)

        return self._database.write(work)

    def decisions(
        self, environment: Environment | None = None, cell: Cell | None = None, *, history: bool = False
    ) -> list[Decision]:
        """The latest decision of each cell and environment (by ``decided_at``), without quarantined entries.

        Args:
            environment: Only where its key matches.
            cell: Only for this cell.
            history: All of them instead, oldest first.
        """
        return self._database.read(
            lambda session: decisions.load(session, environment=environment, cell=cell, history=history)
        )

    def mark(self, trial_id: int, reason: str) -> None:
        """Quarantine a trial: kept, but never chosen again, and free to be tried anew. The first reason stays.

        Raises:
            ValueError: for an unknown trial.
        """

        def work(session: Session) -> None:
            _get_trial(session, trial_id)
            if session.get(QuarantineRow, trial_id) is None:
                session.add(
                    QuarantineRow(trial_id=trial_id, reason=rows.clean_text(reason), marked_at=trials.now_utc())
                )

        self._database.write(work)

    def quarantined(self) -> dict[int, str]:
        """Reason by trial id."""

        def work(session: Session) -> dict[int, str]:
            query = select(QuarantineRow).order_by(QuarantineRow.trial_id)
            return {row.trial_id: row.reason for row in session.scalars(query)}

        return self._database.read(work)


def _get_trial(session: Session, trial_id: int) -> TrialRow:
    trial = session.get(TrialRow, trial_id)
    if trial is None:
        raise ValueError(f"there is no trial {trial_id}")
    return trial
