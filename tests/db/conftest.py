from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoflash.db.repository import Repository


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of the current schema without rows, to copy: migrating takes longer than most tests."""
    file = tmp_path_factory.mktemp("database") / "empty.sqlite"
    Repository.open(str(file)).close()
    return file


@pytest.fixture
def database(tmp_path: Path, empty_database: Path) -> Path:
    """A file of this test's own."""
    return Path(shutil.copyfile(empty_database, tmp_path / "t.sqlite"))


@pytest.fixture
def repository(database: Path) -> Iterator[Repository]:
    """Open for writing."""
    with Repository.open(str(database)) as opened:
        yield opened
