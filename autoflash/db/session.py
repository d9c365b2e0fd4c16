"""Short transactions on one database, from any thread and on either side of a fork.

SQLite connections live no longer than a transaction, so nothing is inherited over a fork and no reader is in the way
of a writer for long; forks wait for the transaction that is under way. Server connections are pooled per process.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import Session

from autoflash.db import migrate, sqlite_file
from autoflash.db.location import Location
from autoflash.db.sqlite_file import ReadAccess
from autoflash.errors import DatabaseError

T = TypeVar("T")

_RETRY_FOR_S = 90.0
_INTEGRITY_ATTEMPTS = 5
_FORK_WAIT_S = 10.0
_WRITES = "autoflash_writes"


class _ForkGate:
    """Held by each SQLite transaction of this process, so that no other thread forks in the middle of one.

    SQLite keeps its POSIX locks per process and per file: a child that inherits a connection in use would believe
    that it holds locks which only its parent has.
    """

    def __init__(self) -> None:
        self._here = threading.local()
        self._make_locks()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child)

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        # Who waits for the lock holds the queue, so that a busy writer cannot take the lock again before a fork has it.
        self._queue = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep forks away; a thread may nest it."""
        depth = getattr(self._here, "depth", 0)
        if depth == 0:
            with self._queue:
                self._lock.acquire()
        self._here.depth = depth + 1
        try:
            yield
        finally:
            self._here.depth = depth
            if depth == 0:
                self._lock.release()

    def _before(self) -> None:
        self._here.queued = self._here.locked = False
        # A thread that forks inside its own transaction has the lock already.
        if getattr(self._here, "depth", 0) == 0:
            self._here.queued = self._queue.acquire(timeout=_FORK_WAIT_S)
            self._here.locked = self._lock.acquire(timeout=_FORK_WAIT_S)

    def _in_parent(self) -> None:
        if self._here.locked:
            self._lock.release()
        if self._here.queued:
            self._queue.release()

    def _in_child(self) -> None:
        # Other holders do not exist on this side of the fork.
        if getattr(self._here, "depth", 0) == 0:
            self._make_locks()


_fork_gate = _ForkGate()


class Database:
    """An opened database: runs functions in transactions, repeats them while it is locked, and explains failures."""

    def __init__(self, location: Location, engine: Engine, access: ReadAccess | None, read_only: bool) -> None:
        self.location = location
        self.read_only = read_only
        self._engine = engine
        self._access = access
        self._pid = os.getpid()
        self._is_older = False

    @classmethod
    def open(cls, location: Location, *, read_only: bool) -> Database:
        """Open for reading, or for writing: then it is created or upgraded first.

        Raises:
            DatabaseError: naming the place and what to do.
        """
        try:
            if location.file is None:
                return cls._open_server(location, read_only)
            with _fork_gate.held():
                return cls._open_to_read(location) if read_only else cls._open_to_write(location)
        except DatabaseError as error:
            if str(location) in str(error):
                raise
            raise DatabaseError(f"tuning database {location}: {error}") from error
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            raise explained(location, error) from error

    @classmethod
    def _open_to_write(cls, location: Location) -> Database:
        file = _file(location)
        database = cls(location, _sqlite_engine(lambda: sqlite_file.connect(file, "mode=rw")), None, False)
        with sqlite_file.locked(file):
            sqlite_file.create(file, _migrate_file)
            if database.read(_revision) != migrate.CURRENT:
                _migrate_file(file)
            sqlite_file.prefer_wal(file)
        return database

    @classmethod
    def _open_to_read(cls, location: Location) -> Database:
        access = sqlite_file.read_access(_file(location))
        try:
            database = cls(location, _sqlite_engine(access.connect), access, True)
            database._look_at_revision()
        except BaseException:
            access.close()
            raise
        return database

    @classmethod
    def _open_server(cls, location: Location, read_only: bool) -> Database:
        assert location.url is not None
        try:
            engine = _quiet_when_interrupted(create_engine(location.url, pool_pre_ping=True))
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"{location.url.drivername} needs the Python module {error.name!r}; "
                "for PostgreSQL: pip install 'autoflash[postgres]'"
            ) from error
        database = cls(location, engine, None, read_only)
        try:
            revision = database.read(_revision)
            if read_only:
                database._look_at_revision()
            elif revision != migrate.CURRENT:
                database.write(_migrate)
        except BaseException:
            engine.dispose()
            raise
        return database

    def close(self) -> None:
        """Let go of connections; the last writer leaves a file that can be read alone."""
        self._engine.dispose(close=self._pid == os.getpid())
        if self._access is not None and self._pid == os.getpid():
            self._access.close()
        if not self.read_only and self.location.file is not None:
            with _fork_gate.held():
                sqlite_file.settle(self.location.file)

    def read(self, work: Callable[[Session], T]) -> T:
        """Run in a transaction that only reads; of the schema before, as if it were the current one."""
        if not self._is_older:
            return self._run(work, writes=False)

        def with_views(session: Session) -> T:
            migrate.lay_views(session.connection())
            return work(session)

        return self._run(with_views, writes=False)

    def write(self, work: Callable[[Session], T]) -> T:
        """Run in a transaction that takes the write lock at its start; may run more than once.

        Raises:
            DatabaseError: when opened read-only, or when the database stays locked or fails.
        """
        if self.read_only:
            raise DatabaseError(f"tuning database {self.location} was opened for reading")
        return self._run(work, writes=True)

    def _look_at_revision(self) -> None:
        """Refuse to read a schema that is unknown; note one that lacks something."""
        revision = self.read(_revision)
        migrate.refuse_unknown(revision, migrate.READABLE)
        self._is_older = revision != migrate.CURRENT

    def _run(self, work: Callable[[Session], T], *, writes: bool) -> T:
        deadline = time.monotonic() + _RETRY_FOR_S
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._once(work, writes)
            except IntegrityError as error:
                # On a server two processes may add the same row at once; the second finds it when it tries again.
                if attempt >= _INTEGRITY_ATTEMPTS:
                    raise explained(self.location, error) from error
            except (SQLAlchemyError, sqlite3.Error) as error:
                if not sqlite_file.is_busy(error) or time.monotonic() > deadline:
                    raise explained(self.location, error) from error
            time.sleep(random.uniform(0.0, min(1.0, 0.01 * 2**attempt)))

    def _once(self, work: Callable[[Session], T], writes: bool) -> T:
        engine = self._own_engine().execution_options(**{_WRITES: writes})
        if self.location.file is None:
            with Session(engine, expire_on_commit=False) as session, session.begin():
                return work(session)
        with _fork_gate.held(), Session(engine, expire_on_commit=False) as session, session.begin():
            return work(session)

    def _own_engine(self) -> Engine:
        """The engine, without connections that belong to the process that this one was forked from."""
        if self._pid != os.getpid():
            self._engine.dispose(close=False)
            self._pid = os.getpid()
        return self._engine


def explained(location: Location, error: BaseException) -> DatabaseError:
    """What a driver's error means for the user."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig is not None else error
    text = str(cause).strip() or type(cause).__name__
    if "malformed" in text or "not a database" in text:
        advice = "the file is damaged; move it aside and tune or import again, or restore a copy"
    elif sqlite_file.is_busy(cause):
        advice = "another process holds it; end that process or choose another place with --db or AUTOFLASH_DB"
    elif "disk I/O" in text:
        advice = "the file system failed; on a network file system choose a local place with --db or AUTOFLASH_DB"
    elif "disk is full" in text:
        advice = "free some space"
    elif "readonly" in text or "unable to open" in text or isinstance(cause, PermissionError):
        advice = "choose a readable and writable place with --db or AUTOFLASH_DB"
    else:
        advice = "see `autoflash doctor`"
    return DatabaseError(f"tuning database {location}: {text}; {advice}")


def _file(location: Location) -> Path:
    assert location.file is not None
    return location.file


def _sqlite_engine(connect: Callable[[], sqlite3.Connection]) -> Engine:
    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    event.listen(engine, "begin", _begin)
    return _quiet_when_interrupted(engine)


def _quiet_when_interrupted(engine: Engine) -> Engine:
    """Leave Ctrl-C to who asked for it: SQLAlchemy logs it as an error where it falls into the end of a connection."""
    logger = engine.pool.logger
    if isinstance(logger, logging.Logger):
        logger.addFilter(_is_no_interrupt)
    return engine


def _is_no_interrupt(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt))


def _begin(connection: Connection) -> None:
    """Take the write lock at the start: a transaction that upgrades from reading could not wait for it."""
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _revision(session: Session) -> str | None:
    return migrate.revision_of(session.connection())


def _migrate(session: Session) -> None:
    """Bring whatever is there to the current schema, inside the session's transaction."""
    connection = session.connection()
    # Another process may have upgraded it since it was looked at.
    revision = migrate.revision_of(connection)
    if revision is not None:
        migrate.refuse_unknown(revision, migrate.KNOWN)
    if revision != migrate.CURRENT:
        migrate.upgrade(connection)


def _migrate_file(file: Path) -> None:
    engine = _sqlite_engine(lambda: sqlite_file.connect(file, "mode=rw", foreign_keys=False))
    with Session(engine.execution_options(**{_WRITES: True})) as session, session.begin():
        _migrate(session)
