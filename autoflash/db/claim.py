"""Who works on which trial, so that tuners that share a database do not do the same one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from pathlib import Path
from types import TracebackType

from sqlalchemy import CursorResult, delete, select, update
from sqlalchemy.orm import Session

from autoflash.db import rows
from autoflash.db.schema import CellRow, ClaimRow, EnvironmentRow, QuarantineRow, TrialRow
from autoflash.db.session import Database
from autoflash.problem import Cell
from autoflash.trial import Environment
from autoflash.variant import Variant


class Claim:
    """The right of this process to try one variant on one cell. It ends when released, or unless renewed in time."""

    def __init__(self, database: Database, token: str, ttl_s: float) -> None:
        self._database = database
        self._token = token
        self._ttl_s = ttl_s

    def heartbeat(self) -> bool:
        """Renew it; False where it expired and another process has taken it over."""

        def work(session: Session) -> bool:
            now = time.time()
            result = session.execute(
                update(ClaimRow).where(ClaimRow.token == self._token).values(heartbeat=now, expires=now + self._ttl_s)
            )
            assert isinstance(result, CursorResult)
            return result.rowcount == 1

        return self._database.write(work)

    def release(self) -> None:
        """Give it back; harmless when it is gone already."""

        def work(session: Session) -> None:
            session.execute(delete(ClaimRow).where(ClaimRow.token == self._token))

        self._database.write(work)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def take(
    database: Database,
    cell: Cell,
    variant: Variant,
    environment: Environment,
    *,
    source_digest: str | None,
    ttl_s: float,
) -> Claim | None:
    """Claim a trial, in one transaction; see :meth:`Repository.claim`."""
    host, pid = host_name(), os.getpid()
    started = process_start(pid)
    token = uuid.uuid4().hex

    def work(session: Session) -> Claim | None:
        now = time.time()
        cell_id = rows.find_or_add_cell(session, cell).id
        variant_id = rows.find_or_add_variant(session, variant).id
        environment_id = rows.find_or_add_environment(session, environment).id
        finished = select(TrialRow.id).where(
            TrialRow.cell_id == cell_id,
            TrialRow.variant_id == variant_id,
            TrialRow.environment_id == environment_id,
            TrialRow.id.not_in(select(QuarantineRow.trial_id)),
        )
        if source_digest is not None:
            finished = finished.where(TrialRow.source_digest == source_digest)
        if session.scalars(finished.limit(1)).first() is not None:
            return None
        row = session.scalars(
            select(ClaimRow).where(
                ClaimRow.cell_id == cell_id,
                ClaimRow.variant_id == variant_id,
                ClaimRow.environment_id == environment_id,
            )
        ).one_or_none()
        if row is not None and is_live(row, now):
            return None
        if row is None:
            row = ClaimRow(cell_id=cell_id, variant_id=variant_id, environment_id=environment_id)
            session.add(row)
        row.token, row.host, row.pid, row.started = token, host, pid, started
        row.heartbeat, row.expires = now, now + ttl_s
        return Claim(database, token, ttl_s)

    return database.write(work)


def live_variant_ids(session: Session, cell: Cell, environment: Environment) -> list[int]:
    """Rows of the variants that live processes are trying on a cell."""
    now = time.time()
    query = (
        select(ClaimRow)
        .join(CellRow, CellRow.id == ClaimRow.cell_id)
        .join(EnvironmentRow, EnvironmentRow.id == ClaimRow.environment_id)
        .where(CellRow.key == cell.key, EnvironmentRow.key == environment.key)
    )
    return [row.variant_id for row in session.scalars(query) if is_live(row, now)]


def is_live(row: ClaimRow, now: float) -> bool:
    """Whether a claim still holds: in time, and its process not known to be gone."""
    if row.expires <= now:
        return False
    return row.host != host_name() or is_running(row.pid, row.started)


def is_running(pid: int, started: int) -> bool:
    """Whether a process of this host that started at the given time still runs; a reused id is another process."""
    if os.name != "posix":
        # Signal 0 would end the process there; its claims run out instead.
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        # It belongs to another user.
        return True
    state, now_started = _process(pid)
    return state not in ("Z", "X") and (started == 0 or now_started in (0, started))


def process_start(pid: int) -> int:
    """When a process started, in ticks since boot; 0 where the platform does not say."""
    return _process(pid)[1]


def _process(pid: int) -> tuple[str, int]:
    """State and start of a process, from ``/proc``."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # The command's name stands in parentheses and may hold spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], int(fields[19])
    return "", 0


def host_name() -> str:
    """This host; containers of one name that do not see each other's processes count as several."""
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(Path("/proc/self/ns/pid").readlink())
    return f"{socket.gethostname()} {namespace}".strip()
