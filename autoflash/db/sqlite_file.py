"""The file under a SQLite database: created once, opened for writing or reading, left readable alone.

Knows nothing of tables. WAL is used on local file systems only, since its shared memory does not work across hosts.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from autoflash.errors import DatabaseError

BUSY_TIMEOUT_S = 35.0
"""How long SQLite itself waits for another writer before it reports ``database is locked``."""

LOCK_TIMEOUT_S = 120.0
"""How long to wait for another process that creates or upgrades the file."""

_WAL_SWITCH_S = 2.0
_COPY_ATTEMPTS = 5
_SHARED_FILE_MODE = 0o666
_MOUNTS = Path("/proc/mounts")
_NETWORK_TYPES = frozenset(
    ("nfs", "nfs4", "cifs", "smbfs", "smb3", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "virtiofs")
)


def beside(file: Path, suffix: str) -> Path:
    """The companion of a database file, such as its ``-wal``."""
    return file.with_name(file.name + suffix)


def is_on_network(file: Path, mounts: str | None = None) -> bool:
    """Whether the file lies on a file system that other hosts may share, or that a user-space process serves.

    Args:
        file: Absolute path, which need not exist.
        mounts: Text in the format of ``/proc/mounts``, which is read where None; without one, all is local.
    """
    if mounts is None:
        try:
            mounts = _MOUNTS.read_text(errors="replace")
        except OSError:
            return False
    longest, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        # Of several mounts on one point the last one is seen.
        if len(point) >= longest and file.is_relative_to(point):
            longest, kind = len(point), fields[2]
    return kind in _NETWORK_TYPES or kind.startswith("fuse")


def connect(file: Path, query: str, *, foreign_keys: bool = True) -> sqlite3.Connection:
    """Open a file by URI.

    Args:
        file: Absolute path.
        query: ``mode=rw`` (never creates), ``mode=ro`` or ``mode=ro&immutable=1``.
        foreign_keys: Enforce them; off for a migration, which may drop and remake a table that others point to.
    """
    connection = sqlite3.connect(
        f"{file.as_uri()}?{query}", uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    connection.execute(f"PRAGMA foreign_keys={'ON' if foreign_keys else 'OFF'}")
    return connection


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold the lock of those who create, upgrade or switch the journal of a file.

    Raises:
        DatabaseError: when the folder cannot be made or written, or the lock is not free in time.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not beside(file, ".lock").exists():
            # A FileLock waits for a file that cannot be made, as in /proc, as if another process held it.
            tempfile.TemporaryFile(dir=file.parent).close()
        # Users who share a folder share its database too, hence not only the owner may lock.
        lock = filelock.FileLock(beside(file, ".lock"), timeout=LOCK_TIMEOUT_S, mode=_SHARED_FILE_MODE)
        lock.acquire()
    except filelock.Timeout as error:
        raise DatabaseError(
            f"{beside(file, '.lock')} is held by another process for {LOCK_TIMEOUT_S:.0f} s; is one stuck?"
        ) from error
    except OSError as error:
        raise DatabaseError(
            f"cannot write in {file.parent} ({error.strerror or error}); "
            "choose a writable place with --db or AUTOFLASH_DB"
        ) from error
    try:
        yield
    finally:
        lock.release()


def create(file: Path, fill: Callable[[Path], None]) -> None:
    """Make the file if it is absent or empty. The caller holds the lock.

    It appears whole: it is filled under another name and renamed. It is born in WAL mode where that is allowed, since
    switching a file that others have open needs an exclusive lock.

    Args:
        file: Absolute path.
        fill: Creates the tables in an empty file.
    """
    if file.exists() and file.stat().st_size:
        return
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", suffix=".new", dir=file.parent)
    os.close(handle)
    new = Path(name)
    try:
        fill(new)
        if not is_on_network(file):
            with contextlib.closing(connect(new, "mode=rw")) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
        if file.exists():
            new.chmod(file.stat().st_mode & 0o777)
        else:
            new.chmod(_SHARED_FILE_MODE & ~_umask())
        new.replace(file)
    finally:
        for suffix in ("", "-journal", "-wal", "-shm"):
            beside(new, suffix).unlink(missing_ok=True)


def _umask() -> int:
    """The process's umask, read where that needs no change of it."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    return 0o022


def prefer_wal(file: Path) -> None:
    """Let readers and a writer work at once, where the file system allows it. The caller holds the lock.

    The switch needs the file for itself and is not covered by the busy timeout: it is tried for a moment, and a file
    that stays as it was works too.
    """
    if is_on_network(file):
        return
    deadline = time.monotonic() + _WAL_SWITCH_S
    while True:
        try:
            with contextlib.closing(connect(file, "mode=rw")) as connection:
                connection.execute("PRAGMA busy_timeout=100")
                connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if not is_busy(error) or time.monotonic() > deadline:
                return
            time.sleep(random.uniform(0.01, 0.1))


def settle(file: Path) -> None:
    """Move everything into the one file and leave it in DELETE mode, so that a copy of it is complete.

    Does nothing where others have the file open: the last of them will do it.
    """
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(file, "mode=rw")) as connection:
        connection.execute("PRAGMA busy_timeout=0")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.execute("PRAGMA journal_mode=DELETE")


def is_busy(error: BaseException) -> bool:
    """Whether trying again may help."""
    text = str(error)
    return any(words in text for words in ("is locked", "is busy", "locking protocol"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAccess:
    """How to read a file without changing anything.

    Attributes:
        file: The file itself, or a copy of it.
        query: For :func:`connect`.
        folder: Temporary folder of the copy, for the reader to delete; None where there is none.
    """

    file: Path
    query: str
    folder: Path | None = None

    def connect(self) -> sqlite3.Connection:
        """Open a connection."""
        return connect(self.file, self.query)

    def close(self) -> None:
        """Delete the copy, if there is one."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def read_access(file: Path) -> ReadAccess:
    """Find a way to read: directly; as immutable where there is no log; else through a copy of file and log.

    A reader without write permission cannot make the shared memory of a file in WAL mode, hence the other ways.

    Raises:
        DatabaseError: when the file is absent or unreadable.
    """
    if file.is_dir():
        raise DatabaseError("it is a folder; name a file with --db or AUTOFLASH_DB")
    if not file.is_file():
        raise DatabaseError("it does not exist; `autoflash tune` makes it")
    if not os.access(file, os.R_OK):
        raise DatabaseError("no permission to read it")
    access = ReadAccess(file=file, query="mode=ro")
    try:
        _probe(access)
    except sqlite3.OperationalError as error:
        if not _needs_other_way(error):
            raise
    else:
        return access
    logs = [log for log in (beside(file, "-wal"), beside(file, "-journal")) if log.exists() and log.stat().st_size]
    if not logs:
        return ReadAccess(file=file, query="mode=ro&immutable=1")
    return _copy(file, logs)


def _probe(access: ReadAccess) -> None:
    with contextlib.closing(access.connect()) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()


def _needs_other_way(error: sqlite3.OperationalError) -> bool:
    text = str(error)
    return any(words in text for words in ("unable to open", "readonly", "read-only"))


def _copy(file: Path, logs: list[Path]) -> ReadAccess:
    """Copy a database with its log into a temporary folder; again when a writer moved meanwhile."""
    for _ in range(_COPY_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix="autoflash-read-"))
        access = ReadAccess(file=folder / file.name, query="mode=rw", folder=folder)
        try:
            before = _stamps([file, *logs])
            for source in (file, *logs):
                shutil.copyfile(source, folder / source.name)
            if _stamps([file, *logs]) == before:
                _probe(access)
                return access
        except (FileNotFoundError, sqlite3.DatabaseError):
            # The log was merged into the file while it was copied.
            pass
        except BaseException:
            access.close()
            raise
        access.close()
        time.sleep(random.uniform(0.01, 0.1))
    raise DatabaseError("it is being written faster than it can be copied, and cannot be read in place; try again")


def _stamps(files: list[Path]) -> list[tuple[int, int]]:
    return [(status.st_mtime_ns, status.st_size) for status in (file.stat() for file in files)]
