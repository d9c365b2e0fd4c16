from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from autoflash.db import migrate, session
from autoflash.db.repository import Repository
from autoflash.db.schema import Base
from autoflash.errors import DatabaseError
from autoflash.problem import Feature
from autoflash.trial import Level
from tests.factories import make_cell, make_decision, make_environment, make_trial

ASSETS = Path(__file__).parent / "assets"


def schema_of(file: Path) -> dict[str, list[str]]:
    """Columns and constraints of each definition, in no order."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        found = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
        # Commas outside parentheses, and line ends.
        parts = {name: re.split(r",(?![^(]*\))|\n", sql) for name, sql in found}
        return {name: sorted(part.strip(" ,\t") for part in each if part.strip()) for name, each in parts.items()}


def set_revision(file: Path, revision: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        connection.execute(f"UPDATE {migrate.VERSION_TABLE} SET version_num = ?", (revision,))


def test_the_history_ends_in_the_revision_that_the_code_expects() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrate.__file__).parent / "migrations"))
    history = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]

    assert tuple(reversed(history)) == migrate.KNOWN
    assert migrate.KNOWN[-1] == migrate.CURRENT
    assert set(migrate.READABLE) == set(migrate.KNOWN[-2:])


def test_migrations_make_the_tables_that_the_models_describe(database: Path) -> None:
    engine = create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": migrate.VERSION_TABLE})
        differences = compare_metadata(context, Base.metadata)
    engine.dispose()

    assert differences == []


def test_migrations_make_the_constraints_that_the_models_describe(database: Path, tmp_path: Path) -> None:
    direct = tmp_path / "direct.sqlite"
    engine = create_engine(f"sqlite:///{direct}")
    Base.metadata.create_all(engine)
    engine.dispose()

    migrated = schema_of(database)
    del migrated[migrate.VERSION_TABLE]

    assert migrated == schema_of(direct)


@pytest.mark.parametrize("old", sorted(ASSETS.glob("*.sqlite")), ids=lambda file: file.stem)
@pytest.mark.parametrize("read_only", [False, True])
def test_an_old_database_keeps_its_rows(tmp_path: Path, old: Path, read_only: bool) -> None:
    if read_only and old.stem.removeprefix("schema_") not in migrate.READABLE:
        pytest.skip("it has to be upgraded first")
    file = Path(shutil.copyfile(old, tmp_path / "t.sqlite"))

    with Repository.open(str(file), read_only=read_only) as repository:
        (trial,) = repository.trials()
        decisions = repository.decisions()

    assert trial.measurement is not None
    assert (trial.id, trial.measurement.median_us, trial.level) == (1, 100.0, Level.FULL)
    assert [decision.reason for decision in decisions] == ["kept over upgrades"]


def test_what_was_recorded_before_there_were_features_is_plain_attention(tmp_path: Path) -> None:
    file = Path(shutil.copyfile(ASSETS / "schema_0001.sqlite", tmp_path / "t.sqlite"))

    with Repository.open(str(file)) as repository:
        (trial,) = repository.trials(cell=make_cell())
        (decision,) = repository.decisions(cell=make_cell())
        known = repository.verification(trial.source_digest, trial.variant, trial.cell, trial.environment)
        cells = repository.cells(make_environment())

    assert trial.cell == decision.cell == make_cell()
    assert cells == [make_cell()]
    assert known == trial.verification
    assert known is not None


@pytest.mark.parametrize("read_only", [False, True])
def test_what_was_recorded_before_there_were_expressions_has_none(tmp_path: Path, read_only: bool) -> None:
    file = Path(shutil.copyfile(ASSETS / "schema_0002.sqlite", tmp_path / "t.sqlite"))
    cell = make_cell(features=(Feature.SOFTCAP, Feature.WINDOW), window_bucket=7)

    with Repository.open(str(file), read_only=read_only) as repository:
        (trial,) = repository.trials(cell=cell)
        (decision,) = repository.decisions(cell=cell)

    assert trial.cell == decision.cell == cell
    assert (cell.score_mod, cell.mask_mod) == ("", "")


def test_reading_the_schema_before_changes_nothing(tmp_path: Path) -> None:
    file = Path(shutil.copyfile(ASSETS / "schema_0002.sqlite", tmp_path / "t.sqlite"))
    before = file.read_bytes()

    with Repository.open(str(file), read_only=True) as repository:
        repository.decisions()

    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_reader_goes_on_where_the_database_is_upgraded_meanwhile(tmp_path: Path) -> None:
    file = Path(shutil.copyfile(ASSETS / "schema_0002.sqlite", tmp_path / "t.sqlite"))
    modified = make_cell(features=(Feature.SCORE_MOD,), score_mod="score_mod() = score * 2")

    with Repository.open(str(file), read_only=True) as reader:
        before = [trial.cell for trial in reader.trials()]
        with Repository.open(str(file)) as writer:
            writer.record(make_trial(cell=modified))
        assert [trial.cell for trial in reader.trials()] == [*before, modified]


def test_each_schema_has_a_database_in_the_tests() -> None:
    assert [file.stem for file in sorted(ASSETS.glob("*.sqlite"))] == [f"schema_{name}" for name in migrate.KNOWN]


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_of_a_newer_autoflash_is_refused_and_left_alone(database: Path, read_only: bool) -> None:
    set_revision(database, "9999")
    before = database.read_bytes()

    with pytest.raises(DatabaseError, match=r"t\.sqlite: its schema '9999' is unknown .* upgrade autoflash"):
        Repository.open(str(database), read_only=read_only)

    assert database.read_bytes() == before


def test_a_schema_too_old_to_read_says_what_upgrades_it(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "READABLE", ())

    with pytest.raises(DatabaseError, match="too old to read; any writing command, such as tune, upgrades it"):
        Repository.open(str(database), read_only=True)


def test_a_database_without_tables_is_filled(tmp_path: Path) -> None:
    file = tmp_path / "t.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version=1")
    assert file.stat().st_size > 0
    with pytest.raises(DatabaseError, match="it is empty"):
        Repository.open(str(file), read_only=True)

    with Repository.open(str(file)) as repository:
        assert repository.record(make_trial()).id == 1
        assert repository.save_decision(make_decision())


def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version=1")
    upgrade = migrate.upgrade

    def fail(connection: object) -> None:
        upgrade(connection)  # type: ignore[arg-type]  # passed through
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(session.migrate, "upgrade", fail)
    with pytest.raises(DatabaseError, match="disk I/O error"):
        Repository.open(str(file))

    assert schema_of(file) == {}
