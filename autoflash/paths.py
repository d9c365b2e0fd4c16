"""Where things lie. The only module that reads environment variables, and only when called."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).parent


def _shipped(name: str) -> Path:
    """A data folder: inside the package in a wheel, beside it in a source checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def templates_dir() -> Path:
    """Folder of the kernel templates."""
    return _shipped("templates")


def tuning_db_dir() -> Path:
    """Folder of the tuning tables that ship with autoflash."""
    return _shipped("tuning_db")


def database_url(given: str | None = None) -> str:
    """Path or SQLAlchemy URL of the tuning database.

    Args:
        given: What the user passed; wins over ``AUTOFLASH_DB``, which wins over the user's data folder.
    """
    chosen = given or os.environ.get("AUTOFLASH_DB")
    return chosen or str(Path(platformdirs.user_data_dir("autoflash", appauthor=False)) / "tuning.sqlite")


def table_file(given: str | None = None) -> Path | None:
    """Exported table that replaces the database for dispatch (``AUTOFLASH_TABLE``), or None."""
    chosen = given or os.environ.get("AUTOFLASH_TABLE")
    return Path(chosen) if chosen else None


def cache_dir() -> Path:
    """Folder for rendered kernels, compiled kernels and locks (``AUTOFLASH_CACHE_DIR``)."""
    chosen = os.environ.get("AUTOFLASH_CACHE_DIR")
    return Path(chosen) if chosen else Path(platformdirs.user_cache_dir("autoflash", appauthor=False))


def writable_cache_dir() -> Path:
    """:func:`cache_dir`, or a folder of this process's own where that one cannot be written; said once."""
    return _writable(cache_dir())


@functools.cache
def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Creating a file is the only question that every kind of file system answers truly.
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        fallback = Path(tempfile.mkdtemp(prefix="autoflash-"))
        logging.getLogger("autoflash").warning(
            "the cache folder %s cannot be written (%s): kernels are kept in %s for this process; "
            "set AUTOFLASH_CACHE_DIR to a folder of yours",
            folder,
            error.strerror or error,
            fallback,
        )
        return fallback


def vendor_policy() -> str:
    """Default of the ``vendor`` argument (``AUTOFLASH_VENDOR``): allow, never or only."""
    return os.environ.get("AUTOFLASH_VENDOR", "allow")


def launcher() -> str:
    """What launches kernels on NVIDIA GPUs (``AUTOFLASH_LAUNCHER``): triton, or native, which is autoflash itself."""
    return os.environ.get("AUTOFLASH_LAUNCHER", "triton")


def log_level() -> str:
    """Level of the ``autoflash`` logger (``AUTOFLASH_LOG``)."""
    return os.environ.get("AUTOFLASH_LOG", "WARNING").upper()


def triton_cache_dir() -> Path:
    """Folder of Triton's compiled kernels: where ``TRITON_CACHE_DIR`` says, else beside our own files."""
    chosen = os.environ.get("TRITON_CACHE_DIR")
    return Path(chosen) if chosen else writable_cache_dir() / "triton"
