from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoflash.db import session, sqlite_file
from autoflash.db.repository import Repository
from autoflash.errors import DatabaseError
from tests.factories import make_trial, make_variant

# The child runs nothing but SQLite and leaves by os._exit.
nobody = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

MOUNTS = """\
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/local\\040disk xfs rw 0 0
sshfs /mnt/far fuse.sshfs rw 0 0
"""


def journal_mode(file: Path) -> str:
    """What the file's header says, without opening it as a database."""
    return "wal" if file.read_bytes()[18] == 2 else "delete"


@contextlib.contextmanager
def held_open(file: Path) -> Iterator[None]:
    """Another program that reads all the while."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM trial").fetchone()
        yield


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("/tmp/t.sqlite", False),
        ("/home/me/t.sqlite", True),
        ("/homes/t.sqlite", False),
        ("/home/local disk/t.sqlite", False),
        ("/mnt/far/t.sqlite", True),
    ],
)
def test_the_mount_that_holds_a_file_says_whether_it_is_on_a_network(file: str, expected: bool) -> None:
    assert sqlite_file.is_on_network(Path(file), MOUNTS) is expected


def test_the_file_is_in_wal_mode_while_open_and_alone_afterwards(tmp_path: Path) -> None:
    file = tmp_path / "new" / "t.sqlite"

    with Repository.open(str(file)) as repository:
        repository.record(make_trial())
        while_open = journal_mode(file)

    assert while_open == "wal"
    assert journal_mode(file) == "delete"
    assert sorted(path.name for path in file.parent.iterdir() if path.suffix != ".lock") == ["t.sqlite"]


def test_wal_is_not_used_on_a_network_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_file, "is_on_network", lambda file: True)

    with Repository.open(str(tmp_path / "t.sqlite")) as repository:
        repository.record(make_trial())

        assert journal_mode(tmp_path / "t.sqlite") == "delete"


def test_closing_does_not_fail_while_another_reads(repository: Repository, database: Path) -> None:
    repository.record(make_trial())

    with held_open(database):
        repository.close()

    with Repository.open(str(database), read_only=True) as reader:
        assert len(reader.trials()) == 1


def test_an_empty_file_is_filled_and_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "t.sqlite"
    file.touch()
    file.chmod(0o660)

    with Repository.open(str(file)) as repository:
        assert repository.trials() == []

    assert stat.S_IMODE(file.stat().st_mode) == 0o660


def test_nothing_is_left_of_a_creation_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(session, "_migrate_file", fail)

    with pytest.raises(DatabaseError, match=r"t\.sqlite: database or disk is full; free some space"):
        Repository.open(str(tmp_path / "t.sqlite"))

    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_a_link_to_a_database_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "real.sqlite")

    Repository.open(str(link)).close()

    assert link.is_symlink()
    assert (tmp_path / "real.sqlite").is_file()


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "damage", [lambda good: b"not a database at all" * 50, lambda good: good[:100] + b"\xff" * (len(good) - 100)]
)
def test_a_damaged_file_is_named_and_left_as_it_is(
    database: Path, read_only: bool, damage: Callable[[bytes], bytes]
) -> None:
    content = damage(database.read_bytes())
    database.write_bytes(content)

    with pytest.raises(DatabaseError, match=r"t\.sqlite.*damaged; move it aside"):
        Repository.open(str(database), read_only=read_only)

    assert database.read_bytes() == content


def test_damage_that_appears_later_is_an_explained_error(repository: Repository, database: Path) -> None:
    database.write_bytes(database.read_bytes()[:100] + b"\xff" * 8000)

    with pytest.raises(DatabaseError, match="damaged; move it aside"):
        repository.trials()


def test_the_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "other.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
    before = file.read_bytes()

    with pytest.raises(DatabaseError, match=r"other\.sqlite: it holds other tables \(alembic_version\)"):
        Repository.open(str(file))

    assert file.read_bytes() == before


@pytest.mark.parametrize("words", ["disk I/O error", "locking protocol", "database disk image is malformed"])
def test_a_failing_driver_is_an_explained_error(database: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise sqlite3.OperationalError(words)

    monkeypatch.setattr(session, "_RETRY_FOR_S", 0.0)
    monkeypatch.setattr(sqlite3, "connect", fail)

    with pytest.raises(DatabaseError, match=rf"t\.sqlite: {words}; "):
        Repository.open(str(database), read_only=True)


def test_a_file_that_vanishes_is_an_explained_error(repository: Repository, database: Path) -> None:
    database.unlink()

    with pytest.raises(DatabaseError, match=r"t\.sqlite: unable to open database file; choose"):
        repository.trials()

    assert not database.exists()


def test_what_is_not_there_cannot_be_read(tmp_path: Path) -> None:
    file = str(tmp_path / "none" / "t.sqlite")

    assert not Repository.exists(file)
    with pytest.raises(DatabaseError, match=r"t\.sqlite: it does not exist; `autoflash tune` makes it"):
        Repository.open(file, read_only=True)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DatabaseError, match=r"cannot write in .*file/folder .*--db or AUTOFLASH_DB"):
        Repository.open(str(tmp_path / "file" / "folder" / "t.sqlite"))


def run_as_nobody(work: Callable[[], object], folder: Path) -> list[str]:
    """What a user who owns nothing gets from a function, and then sees in a folder."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            try:
                result = str(work())
            except DatabaseError as error:
                result = str(error)
            names = sorted(path.name for path in folder.iterdir())
            os.write(writing, f"{result}\n{' '.join(names)}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return lines


def count_trials(file: Path) -> int:
    with Repository.open(str(file), read_only=True) as repository:
        return len(repository.trials())


@pytest.fixture
def sealed() -> Iterator[Path]:
    """A folder that everybody may look into, outside of pytest's, which are private."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        pytest.skip("only root can become another user")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@nobody
def test_another_user_reads_a_copy(repository: Repository, database: Path, sealed: Path) -> None:
    repository.record(make_trial())
    repository.close()
    file = Path(shutil.copyfile(database, sealed / "t.sqlite"))

    assert run_as_nobody(lambda: count_trials(file), sealed) == ["1", "t.sqlite"]


@nobody
def test_another_user_reads_a_copy_that_was_left_in_wal_mode(
    repository: Repository, database: Path, sealed: Path
) -> None:
    with held_open(database):
        repository.record(make_trial())
        repository.close()
    file = Path(shutil.copyfile(database, sealed / "t.sqlite"))
    assert journal_mode(file) == "wal"

    assert run_as_nobody(lambda: count_trials(file), sealed) == ["1", "t.sqlite"]


@nobody
def test_another_user_reads_a_copy_with_what_only_its_log_holds(
    repository: Repository, database: Path, sealed: Path
) -> None:
    repository.record(make_trial())
    with held_open(database):
        repository.record(make_trial(variant=make_variant(BLOCK_M=128)))
        for suffix in ("", "-wal"):
            shutil.copyfile(sqlite_file.beside(database, suffix), sealed / f"t.sqlite{suffix}")
    assert (sealed / "t.sqlite-wal").stat().st_size > 0

    assert run_as_nobody(lambda: count_trials(sealed / "t.sqlite"), sealed) == ["2", "t.sqlite t.sqlite-wal"]


@nobody
def test_another_user_reads_beside_a_writer(repository: Repository, database: Path, sealed: Path) -> None:
    shutil.copyfile(database, sealed / "t.sqlite")

    with Repository.open(str(sealed / "t.sqlite")) as writer, held_open(sealed / "t.sqlite"):
        writer.record(make_trial())
        count, _ = run_as_nobody(lambda: count_trials(sealed / "t.sqlite"), sealed)

    assert count == "1"


@nobody
def test_another_user_cannot_tune_into_a_sealed_folder(database: Path, sealed: Path) -> None:
    file = Path(shutil.copyfile(database, sealed / "t.sqlite"))

    message, names = run_as_nobody(lambda: Repository.open(str(file)), sealed)

    assert f"cannot write in {sealed} (Permission denied); choose a writable place with --db" in message
    assert names == "t.sqlite"


@nobody
def test_another_user_cannot_read_what_is_private(database: Path, sealed: Path) -> None:
    file = Path(shutil.copyfile(database, sealed / "t.sqlite"))
    file.chmod(0o600)

    message, _ = run_as_nobody(lambda: count_trials(file), sealed)

    assert message == f"tuning database {file}: no permission to read it"
