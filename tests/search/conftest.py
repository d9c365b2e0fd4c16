"""A database for the tuner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from autoflash.db.repository import Repository


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    """An empty one, open for writing."""
    with Repository.open(str(tmp_path / "tuning.sqlite")) as repository:
        yield repository
