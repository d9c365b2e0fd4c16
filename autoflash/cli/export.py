"""``autoflash export``: decisions as a table for machines that must not tune."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import click

from autoflash.cli.options import Common, common_options
from autoflash.cli.output import print_json
from autoflash.db.repository import Repository
from autoflash.deploy.export import export_shipped, export_table
from autoflash.dispatch.table import load_decisions
from autoflash.errors import TableError
from autoflash.runtime.probe import environment, probe
from autoflash.trial import Decision


@click.command("export")
@common_options
@click.option("--out", type=click.Path(path_type=Path), help="File to write (default: standard output).")
@click.option("--force", is_flag=True, help="Replace a file that is no table, or has rows that would be lost.")
@click.option("--here", is_flag=True, help="Only this device's decisions, not all of the database.")
@click.option("--shipped", type=click.Path(path_type=Path), help="Write the text form of tuning_db/ into this folder.")
def command(common: Common, out: Path | None, force: bool, here: bool, shipped: Path | None) -> None:
    """Write the decisions of the database as a table for machines that must not tune.

    The table is sorted JSON with a checksum; equal content gives equal bytes. Use it with AUTOFLASH_TABLE=FILE, or
    merge it into another database with `autoflash import`.
    """
    chosen = environment(probe(common.device)) if here else None
    with Repository.open(common.db, read_only=True) as repository:
        if shipped is not None:
            files = export_shipped(repository, shipped, chosen)
            _report(common, [str(file) for file in files])
            return
        text = export_table(repository, chosen)
    if out is None:
        click.echo(text, nl=not text.endswith("\n"))
        return
    if not force:
        _refuse_to_lose(out, load_decisions(text))
    write_atomically(out, text)
    _report(common, [str(out)])


def _report(common: Common, files: list[str]) -> None:
    if common.json:
        print_json({"files": files})
        return
    for file in files:
        click.echo(f"Wrote {file}")


def _refuse_to_lose(out: Path, ours: list[Decision]) -> None:
    """Refuse to replace a file that holds anything which the new table does not.

    Raises:
        click.ClickException: naming what would be lost.
    """
    if not out.exists():
        return
    if out.is_dir():
        raise click.ClickException(f"{out} is a folder; name a file")
    if not out.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise click.ClickException(f"{out} is read-only; --force replaces it")
    try:
        theirs = load_decisions(out.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TableError) as error:
        raise click.ClickException(f"{out} is not a tuning table ({error}); --force replaces it") from error
    kept = {(decision.cell.key, decision.environment.key) for decision in ours}
    lost = [decision for decision in theirs if (decision.cell.key, decision.environment.key) not in kept]
    if lost:
        names = ", ".join(sorted({decision.environment.device_name for decision in lost}))
        raise click.ClickException(
            f"{out} has {len(lost)} decisions that this database lacks ({names}); "
            f"merge them with `autoflash import {out}`, or replace the file with --force"
        )


def write_atomically(path: Path, text: str) -> None:
    """Write a file wholly or not at all: what was there stays until the new text is on the disk.

    Raises:
        click.ClickException: if it cannot be written.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner can read.
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        raise click.ClickException(f"cannot write {path}: {error.strerror}") from error
