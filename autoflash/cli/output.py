"""How results are printed: tables for people, one JSON document for machines."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

UNBOUNDED = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table.

    Attributes:
        title: In the head of the table.
        numeric: Numbers stand at the right.
    """

    title: str
    numeric: bool = False


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written in, before a long run whose results would be lost.

    Raises:
        click.ClickException: naming it.
    """
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.ClickException(f"cannot write in {folder}: {error.strerror or error}") from error


def print_json(content: object) -> None:
    """Print one JSON document, indented, keys in the order given."""
    click.echo(json.dumps(content, indent=2, allow_nan=False))


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; outside a terminal it is as wide as its content, so that nothing is cut."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(
            column.title, justify="right" if column.numeric else "left", overflow="fold", no_wrap=column.numeric
        )
    for row in rows:
        table.add_row(*row)
    # A pipe has no width; rich would assume 80 columns and fold.
    width = None if sys.stdout.isatty() else UNBOUNDED
    console = Console(file=sys.stdout, markup=False, highlight=False, width=width)
    # A title of the table itself would be folded to the width of its columns.
    console.print(title, style="italic", soft_wrap=True)
    console.print(table)
    console.print()


def markdown_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """The same table as Markdown."""
    lines = [
        "| " + " | ".join(column.title for column in columns) + " |",
        "|" + "|".join("---:" if column.numeric else "---" for column in columns) + "|",
    ]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def size_text(size_bytes: float | None) -> str:
    """Bytes for a table, such as ``4.00 GiB``; a dash where there is no number."""
    if size_bytes is None:
        return "-"
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"
