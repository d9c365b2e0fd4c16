"""The schema's history. Alembic is imported only when there is something to migrate."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from autoflash.errors import DatabaseError

VERSION_TABLE = "autoflash_version"
"""Our own name: Optuna's and other people's histories use ``alembic_version``."""

CURRENT = "0003"
"""The revision that ``schema.py`` describes."""

READABLE = ("0002", CURRENT)
"""Revisions whose decisions a reader understands without a migration: the current one and the one before."""

KNOWN = ("0001", "0002", "0003")
"""All revisions, oldest first; a database at any of them can be upgraded."""

# What the tables of the revision before lack, as columns of a query: no expressions.
_ADDED = {"0002": {"cell": "NULL AS score_mod, NULL AS mask_mod"}}

# Arbitrary, but ours: serialises migrations on PostgreSQL, where there is no file to lock.
_ADVISORY_LOCK = 0x6175746F


def revision_of(connection: Connection) -> str | None:
    """The revision that a database is at; None for one without tables.

    Raises:
        DatabaseError: when there are tables, but none of autoflash's.
    """
    tables = inspect(connection).get_table_names()
    if VERSION_TABLE in tables:
        revision = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one_or_none()
        return None if revision is None else str(revision)
    if tables and connection.dialect.name == "sqlite":
        raise DatabaseError(f"it holds other tables ({', '.join(sorted(tables)[:3])}), not a tuning database")
    return None


def refuse_unknown(revision: str | None, known: tuple[str, ...]) -> None:
    """Raise for a schema that this version does not understand.

    Raises:
        DatabaseError: naming both revisions.
    """
    if revision is None:
        raise DatabaseError("it is empty; `autoflash tune` fills it")
    if revision not in known:
        if revision in KNOWN:
            raise DatabaseError(
                f"its schema {revision} is too old to read; any writing command, such as tune, upgrades it"
            )
        raise DatabaseError(
            f"its schema {revision!r} is unknown to this autoflash, which knows up to {CURRENT}; upgrade autoflash"
        )


def lay_views(connection: Connection) -> None:
    """Let an older schema read like the current one: temporary views hide the tables that lack something.

    They are seen by this connection alone, and nothing is written to the database.
    """
    added = _ADDED.get(revision_of(connection) or "", {})
    if connection.dialect.name == "sqlite":
        for table, columns in added.items():
            connection.execute(text(f"CREATE TEMP VIEW {table} AS SELECT *, {columns} FROM main.{table}"))
        return
    # A pooled connection keeps its views, and the database may have been upgraded since.
    for table in _ADDED["0002"]:
        connection.execute(text(f"DROP VIEW IF EXISTS pg_temp.{table}"))
    for table, columns in added.items():
        # Unqualified, the name is that of the table: the view is not there yet.
        connection.execute(text(f"CREATE TEMP VIEW {table} AS SELECT *, {columns} FROM {table}"))


def upgrade(connection: Connection) -> None:
    """Bring an empty or older database to the current schema, inside the caller's transaction."""
    from alembic import command
    from alembic.config import Config

    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": _ADVISORY_LOCK})
    config = Config()
    # A ConfigParser reads the option, so a percent sign in the path must be doubled.
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    if connection.dialect.name == "sqlite" and connection.exec_driver_sql("PRAGMA foreign_key_check").first():
        raise DatabaseError("a row points to one that is not there; the upgrade was not made")
