"""The tables that come with autoflash: ``tuning_db/<device>/<pass>.jsonl``, one decision a line."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from autoflash.db.repository import Repository
from autoflash.db.table_format import lines_text, read_table
from autoflash.deploy.export import write_table
from autoflash.errors import TableError
from autoflash.trial import Decision, Environment


def export_shipped(repository: Repository, folder: Path, environment: Environment | None = None) -> list[Path]:
    """Merge the latest decisions of a database into shipped tables; see :func:`write_shipped`."""
    return write_shipped(repository.decisions(environment=environment), folder)


def write_shipped(decisions: Iterable[Decision], folder: Path) -> list[Path]:
    """Merge decisions into the files of a folder, replacing those of the same cell and environment.

    Returns:
        The files written, sorted.

    Raises:
        TableError: when a file that is there is damaged, or one cannot be written.
    """
    merged: dict[Path, dict[tuple[str, str], Decision]] = defaultdict(dict)
    new = list(decisions)
    files = {_file_of(decision, folder) for decision in new}
    for decision in [*(old for file in files if file.exists() for old in _read(file)), *new]:
        merged[_file_of(decision, folder)][decision.cell.key, decision.environment.key] = decision
    for file in sorted(files):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TableError(f"cannot make {file.parent}: {error.strerror or error}") from error
        write_table(file, lines_text(merged[file].values()), force=True)
    return sorted(files)


def read_shipped(folder: Path) -> list[Decision]:
    """All decisions below a folder, file by file in the order of their names.

    Raises:
        TableError: naming the file, the line and the field.
    """
    return [decision for file in sorted(folder.glob("*/*.jsonl")) for decision in _read(file)]


def device_slug(device_name: str) -> str:
    """Name of a device's folder: ASCII letters and digits. Two devices may share one, as each row says whose it is."""
    ascii_name = unicodedata.normalize("NFKD", device_name).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "-", ascii_name.lower()).strip("-") or "device"


def _file_of(decision: Decision, folder: Path) -> Path:
    return folder / device_slug(decision.environment.device_name) / f"{decision.cell.op.value}.jsonl"


def _read(file: Path) -> list[Decision]:
    try:
        return read_table(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TableError) as error:
        raise TableError(f"{file}: {error}") from error
