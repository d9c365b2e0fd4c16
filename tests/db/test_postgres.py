"""The same door to a server: ``AUTOFLASH_TEST_POSTGRES=postgresql://me@host/empty_database pytest tests/db``."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from autoflash.db.location import Location
from autoflash.db.repository import Repository
from autoflash.deploy.export import export_table, import_table
from autoflash.errors import DatabaseError
from autoflash.problem import Feature
from tests.db.processes import start, wait, write
from tests.factories import make_cell, make_decision, make_environment, make_trial

SERVER = os.environ.get("AUTOFLASH_TEST_POSTGRES", "")

pytestmark = [
    pytest.mark.skipif(not SERVER, reason="needs AUTOFLASH_TEST_POSTGRES, the URL of an empty database"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]


def test_a_server_is_filled_by_many_and_read_by_one(tmp_path: Path) -> None:
    with pytest.raises(DatabaseError, match="it is empty; `autoflash tune` fills it"):
        Repository.open(SERVER, read_only=True)

    statuses = wait(start([functools.partial(write, SERVER, index, 3) for index in range(8)], tmp_path / "errors"))

    assert statuses == [0] * 8, (tmp_path / "errors").read_text()
    with Repository.open(SERVER) as repository:
        assert repository.finished(make_cell(), make_environment()) == len(repository.trials()) == 24
        assert repository.claimed(make_cell(), make_environment()) == []
        assert repository.save_decision(make_decision())
        assert import_table(export_table(repository), repository).added == 0
        assert wait(start([repository.trials], tmp_path / "errors")) == [0]
        assert repository.decisions() == [make_decision()]


def test_a_server_of_the_schema_before_is_read_as_it_is_and_upgraded_by_a_writer() -> None:
    softcap = make_cell(features=(Feature.SOFTCAP,))
    with Repository.open(SERVER) as repository:
        repository.save_decision(make_decision())
    url = Location.of(SERVER).url
    assert url is not None
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE cell DROP COLUMN features, DROP COLUMN window_bucket"))
        connection.execute(text("ALTER TABLE verification DROP COLUMN features"))
        connection.execute(text("UPDATE autoflash_version SET version_num = '0001'"))
    engine.dispose()

    with Repository.open(SERVER, read_only=True) as reader:
        assert [decision.cell for decision in reader.decisions()] == [make_cell()]
        assert {trial.cell for trial in reader.trials()} <= {make_cell()}
        with Repository.open(SERVER) as writer:
            recorded = writer.record(make_trial(cell=softcap))
        assert reader.trials()[-1] == recorded


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(DatabaseError, match=r"127\.0\.0\.1:1/tuning: .*Connection refused"):
        Repository.open("postgresql://me@127.0.0.1:1/tuning")
