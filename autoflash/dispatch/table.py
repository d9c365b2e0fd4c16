"""Decisions in memory, as dispatch looks them up: shipped ones below the user's.

Reading them never writes, migrates or locks, and what cannot be read costs a reason, never an exception.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from autoflash import paths
from autoflash.errors import DatabaseError, TableError
from autoflash.problem import Cell, Parallelism
from autoflash.trial import Decision, Environment

_LOG = logging.getLogger("autoflash")
_CLASSES = list(Parallelism)


class Origin(IntEnum):
    """Where a decision was read; a higher one goes before a lower one."""

    SHIPPED = 0
    DATABASE = 1
    TABLE = 2

    @property
    def words(self) -> str:
        """For people."""
        return ("the tables shipped with autoflash", "the tuning database", "the exported table")[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """A decision that may serve a cell on this device.

    Attributes:
        decision: What was recorded.
        origin: Where it was read.
        distance: Buckets and classes of parallelism between its cell and the one asked for; 0 is the cell itself.
            Features are the same.
        other_group: It was tuned for another number of query heads per key/value head.
    """

    decision: Decision
    origin: Origin
    distance: int
    other_group: bool

    @property
    def is_exact(self) -> bool:
        """Whether it was tuned for the cell that was asked for."""
        return self.distance == 0 and not self.other_group


class Table:
    """Decisions of any number of devices, indexed by what must match exactly."""

    def __init__(self) -> None:
        self._rows: dict[tuple[object, ...], list[tuple[Decision, Origin]]] = defaultdict(list)

    @classmethod
    def from_decisions(cls, decisions: Iterable[Decision], origin: Origin = Origin.DATABASE) -> Table:
        """A table of one origin."""
        table = cls()
        table.add(decisions, origin)
        return table

    def add(self, decisions: Iterable[Decision], origin: Origin) -> None:
        """Lay more decisions over or under those present."""
        for decision in decisions:
            self._rows[_exact(decision.cell)].append((decision, origin))

    def __len__(self) -> int:
        """How many decisions there are, of all devices."""
        return sum(len(rows) for rows in self._rows.values())

    def decisions(self) -> list[Decision]:
        """All of them, in no promised order."""
        return [decision for rows in self._rows.values() for decision, _ in rows]

    def hits(self, cell: Cell, here: Environment) -> list[Hit]:
        """The decisions of this device that may serve a cell: the cell itself first, then the nearest.

        Those made with this Triton go before those of another one at the same distance.
        """
        hits = [
            Hit(
                decision=decision,
                origin=origin,
                distance=_distance(cell, decision.cell),
                other_group=decision.cell.group != cell.group,
            )
            for decision, origin in self._rows.get(_exact(cell), ())
            if other_device(decision.environment, here) is None and decision.choices
        ]
        hits.sort(key=lambda hit: hit.decision.decided_at, reverse=True)
        hits.sort(
            key=lambda hit: (
                hit.other_group,
                hit.distance,
                hit.decision.environment.triton != here.triton,
                -hit.origin,
                hit.decision.cell.key,
            )
        )
        return hits

    def ignored(self, cell: Cell, here: Environment) -> list[str]:
        """Why decisions for exactly this cell do not count here, in words."""
        reasons = {
            f"{decision.environment.device_name}: {reason}"
            for decision, _ in self._rows.get(_exact(cell), ())
            if decision.cell == cell and (reason := other_device(decision.environment, here)) is not None
        }
        return sorted(reasons)


def other_device(recorded: Environment, here: Environment) -> str | None:
    """Why a record is of another device than this one; None where only versions may differ."""
    ours = here.identity()
    for name, value in recorded.identity().items():
        if name != "triton" and ours[name] != value:
            return f"{name} is {ours[name]!r} here, the record is for {value!r}"
    return None


def load(database: str | None = None, table_file: str | None = None) -> Table:
    """Read every decision that this process can see: shipped < database, or shipped < exported table.

    Args:
        database: Path or URL; None takes ``AUTOFLASH_DB`` or the user's data folder.
        table_file: An exported table that replaces the database; None takes ``AUTOFLASH_TABLE``.
    """
    table = Table()
    table.add(_shipped(), Origin.SHIPPED)
    file = paths.table_file(table_file)
    if file is not None:
        table.add(_from_file(file), Origin.TABLE)
    else:
        table.add(_from_database(paths.database_url(database)), Origin.DATABASE)
    return table


def load_decisions(text: str) -> list[Decision]:
    """Decisions of an exported table.

    Raises:
        TableError: for a damaged table or an unknown schema.
    """
    from autoflash.db import table_format  # heavy; only where there is a table

    return list(table_format.read_table(text))


def _shipped() -> list[Decision]:
    decisions: list[Decision] = []
    for file in sorted(paths.tuning_db_dir().glob("**/*.jsonl")):
        decisions += _from_file(file)
    return decisions


def _from_file(file: Path) -> list[Decision]:
    try:
        return load_decisions(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TableError) as error:
        _LOG.warning("autoflash: the table %s is not used: %s", file, error)
        return []


def _from_database(url: str) -> list[Decision]:
    if "://" not in url and not Path(url).exists():
        return []
    from autoflash.db.repository import Repository  # heavy; only where there is a database

    try:
        with Repository.open(url, read_only=True) as repository:
            return list(repository.decisions())
    except (OSError, DatabaseError) as error:
        _LOG.warning("autoflash: the tuning database %s is not used: %s", url, error)
        return []


def _exact(cell: Cell) -> tuple[object, ...]:
    return (
        cell.op,
        cell.dtype,
        cell.head_dim,
        cell.head_dim_v,
        cell.mask,
        cell.deterministic,
        cell.tf32,
        cell.features,
        cell.score_mod,
        cell.mask_mod,
    )


def _distance(cell: Cell, other: Cell) -> int:
    """Steps of log2 between the lengths and between the windows, plus classes of parallelism."""
    return (
        abs(cell.q_bucket - other.q_bucket)
        + abs(cell.k_bucket - other.k_bucket)
        + _window_distance(cell, other)
        + abs(_CLASSES.index(cell.parallelism) - _CLASSES.index(other.parallelism))
    )


def _window_distance(cell: Cell, other: Cell) -> int:
    """A window that is open to a side is one step from one as wide as the sequence."""
    one, another = (each.window_bucket or each.k_bucket + 1 for each in (cell, other))
    return abs(one - another) if cell.window_bucket or other.window_bucket else 0
