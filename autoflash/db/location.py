"""Where a database is: a SQLite file, or any other SQLAlchemy URL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from autoflash import paths
from autoflash.errors import DatabaseError

_POSTGRES_NAMES = ("postgres", "postgresql")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A parsed ``--db`` or ``AUTOFLASH_DB``.

    Attributes:
        file: The SQLite file, absolute and without symbolic links; None for a server.
        url: The server's URL; None for a file.
    """

    file: Path | None
    url: URL | None

    @classmethod
    def of(cls, given: str | None) -> Location:
        """Parse what the user gave; without a scheme it is the path of a SQLite file.

        Args:
            given: Path or URL; None asks ``paths`` for ``AUTOFLASH_DB`` or the default.

        Raises:
            DatabaseError: for a URL that is malformed, or SQLite in memory.
        """
        text = paths.database_url(given)
        if "://" not in text:
            return cls(file=_resolved(text), url=None)
        try:
            url = make_url(text)
        except ArgumentError as error:
            raise DatabaseError(f"{text!r} is neither a path nor a database URL: {error}") from error
        if url.get_backend_name() == "sqlite":
            if not url.database or url.database == ":memory:":
                raise DatabaseError(f"{text!r} has no file; give the path of a SQLite file")
            return cls(file=_resolved(url.database), url=None)
        if url.drivername in _POSTGRES_NAMES:
            url = url.set(drivername="postgresql+psycopg")
        return cls(file=None, url=url)

    def __str__(self) -> str:
        """For messages; never shows a password."""
        return str(self.file) if self.url is None else self.url.render_as_string(hide_password=True)


def _resolved(path: str) -> Path:
    try:
        return Path(path).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise DatabaseError(f"{path!r} cannot be the path of a tuning database: {error}") from error
