from __future__ import annotations

import sys
from pathlib import Path

import pytest

from autoflash.db.location import Location
from autoflash.db.repository import Repository
from autoflash.errors import DatabaseError


def test_a_path_is_a_sqlite_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    location = Location.of("a b%/ü.sqlite")

    assert location.file == tmp_path.resolve() / "a b%" / "ü.sqlite"
    assert location.url is None


def test_nothing_given_asks_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "mine.sqlite"))

    assert Location.of(None).file == tmp_path.resolve() / "mine.sqlite"


def test_a_sqlite_url_is_a_path_too(tmp_path: Path) -> None:
    assert Location.of(f"sqlite:///{tmp_path}/t.sqlite").file == tmp_path.resolve() / "t.sqlite"


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "what?://"])
def test_what_has_no_place_is_refused(url: str) -> None:
    with pytest.raises(DatabaseError, match=r"has no file|neither a path nor a database URL"):
        Location.of(url)


def test_a_password_is_not_shown() -> None:
    location = Location.of("postgresql://me:secret@host/tuning")

    assert str(location) == "postgresql+psycopg://me:***@host/tuning"


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)

    with pytest.raises(DatabaseError, match=r"pip install 'autoflash\[postgres\]'"):
        Repository.open("postgresql://me:secret@localhost/tuning")
