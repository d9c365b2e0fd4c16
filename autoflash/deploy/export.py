"""Decisions out of the database and into it, as tables that people review and machines without a tuner read."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from autoflash.db.repository import Repository
from autoflash.db.table_format import read_table, table_text
from autoflash.errors import TableError
from autoflash.trial import Environment

_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSummary:
    """What an import did.

    Attributes:
        read: Decisions in the table.
        added: Those that the database did not have.
        environments: Where the decisions hold, in the table's order.
    """

    read: int
    added: int
    environments: tuple[Environment, ...]


def export_table(repository: Repository, environment: Environment | None = None) -> str:
    """The latest decisions as a table; equal decisions give equal bytes.

    Args:
        repository: Where they are.
        environment: Only where this key matches; None exports those of all devices.
    """
    return table_text(repository.decisions(environment=environment))


def import_table(text: str, repository: Repository) -> ImportSummary:
    """Put the decisions of a table into the database: all or none, and the same table again changes nothing.

    Those of other devices are kept under their environment, for machines that have it. Where the database has a
    decision for the same cell and environment, the one with the later ``decided_at`` counts.

    Raises:
        TableError: for a damaged table or an unknown schema; the database is not touched.
        DatabaseError: when it cannot be written.
    """
    decisions = read_table(text)
    added = repository.save_decisions(decisions)
    environments = {decision.environment: None for decision in decisions}
    return ImportSummary(read=len(decisions), added=added, environments=tuple(environments))


def write_table(path: Path, text: str, *, force: bool = False) -> None:
    """Write a table wholly or not at all.

    Args:
        path: File to write.
        text: A table in either form.
        force: Replace a file that is read-only, is no table, or has decisions that ``text`` lacks.

    Raises:
        TableError: when it may not or cannot be written; what was there is as it was.
    """
    if path.is_dir():
        raise TableError(f"{path} is a folder; name a file")
    if path.exists() and not force:
        _refuse_loss(path, text)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        raise TableError(f"cannot write {path}: {error.strerror or error}") from error


def _refuse_loss(path: Path, text: str) -> None:
    """Refuse to replace what the new table does not hold."""
    try:
        if not path.stat().st_mode & _WRITABLE:
            raise TableError(f"{path} is read-only; --force replaces it")
        theirs = read_table(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise TableError(f"{path} is there and not a readable table ({error}); --force replaces it") from error
    except TableError as error:
        raise TableError(f"{path} is there: {error}; --force replaces it") from error
    kept = {(decision.cell.key, decision.environment.key) for decision in read_table(text)}
    lost = [decision for decision in theirs if (decision.cell.key, decision.environment.key) not in kept]
    if lost:
        names = ", ".join(sorted({decision.environment.device_name for decision in lost}))
        raise TableError(
            f"{path} has {len(lost)} decisions that the new table lacks (for {names}); import it first, "
            "or replace it with --force"
        )
